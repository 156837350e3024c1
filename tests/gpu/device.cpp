// A device that calls itself CUDA and computes on the host, for the CPU wheel of torch (see device.py).
//
// Storage of the device is host memory under another name. Every operation that has a kernel for the CPU is registered for
// CUDA as well: its tensors are wrapped as host tensors over the same bytes, the CPU's kernel runs, and what it returns is
// given the name of the device again. A host tensor with dimensions among device tensors is an error, as on a GPU, and
// whatever makes the host wait for a GPU is reported to a callback.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>

namespace {
using c10::Device, c10::DeviceIndex, c10::DispatchKey, c10::DispatchKeySet, c10::IValue, c10::Storage, c10::Stream;
using at::Tensor;
using torch::jit::Stack;
const Device GPU(c10::kCUDA, 0), HOST(c10::kCPU);

// --- memory ---
std::atomic<int64_t> allocated{0}, most_allocated{0};
struct Held { c10::DataPtr host; int64_t bytes; };
void release(void* held) {
  allocated -= static_cast<Held*>(held)->bytes;
  delete static_cast<Held*>(held);
}
c10::DataPtr named_gpu(c10::DataPtr host, size_t bytes) {
  const int64_t now = allocated += bytes;
  if (now > most_allocated) most_allocated = now;
  void* data = host.get();
  return {data, new Held{std::move(host), static_cast<int64_t>(bytes)}, &release, GPU};
}
struct DeviceMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override { return named_gpu(c10::GetCPUAllocator()->allocate(bytes), bytes); }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
} device_memory;

std::mutex pinned_lock;
std::map<const char*, size_t> pinned;
struct PinnedMemory final : c10::Allocator {
  struct Block { c10::DataPtr host; };
  static void unpin(void* block) {
    std::lock_guard<std::mutex> guard(pinned_lock);
    pinned.erase(static_cast<const char*>(static_cast<Block*>(block)->host.get()));
    delete static_cast<Block*>(block);
  }
  c10::DataPtr allocate(size_t bytes) override {
    auto host = c10::GetCPUAllocator()->allocate(bytes);
    void* data = host.get();
    std::lock_guard<std::mutex> guard(pinned_lock);
    pinned[static_cast<const char*>(data)] = bytes;
    return {data, new Block{std::move(host)}, &unpin, HOST};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
} pinned_memory;
bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> guard(pinned_lock);
  auto next = pinned.upper_bound(static_cast<const char*>(data));
  return next != pinned.begin() && data < std::prev(next)->first + std::prev(next)->second;
}

// --- one device, one stream ---
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  Device exchangeDevice(Device) const override { return GPU; }
  Device getDevice() const override { return GPU; }
  void setDevice(Device device) const override { TORCH_CHECK(device.index() <= 0, "there is one device, not ", device); }
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const override { return Stream(Stream::DEFAULT, GPU); }
  Stream getDefaultStream(Device) const override { return Stream(Stream::DEFAULT, GPU); }
  Stream getStreamFromGlobalPool(Device, bool) const override { return Stream(Stream::DEFAULT, GPU); }
  Stream getNewStream(Device, int) const override { return Stream(Stream::DEFAULT, GPU); }
  Stream exchangeStream(Stream) const override { return Stream(Stream::DEFAULT, GPU); }
  void record(void** event, const Stream&, const DeviceIndex, const c10::EventFlag) const override { *event = this_event(); }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  double elapsedTime(void*, void*, const DeviceIndex) const override { return 0.0; }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  static void* this_event() { static int event; return &event; }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

// The device draws the numbers that the host would have drawn: a run on it can be compared with one on the CPU.
struct Draws final : c10::GeneratorImpl {
  at::Generator host;
  explicit Draws(at::Generator host) : c10::GeneratorImpl(GPU, DispatchKeySet(DispatchKey::CUDA)), host(std::move(host)) {}
  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_state(const c10::TensorImpl& state) override { host.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return host.unsafeGetGeneratorImpl()->get_state(); }
  Draws* clone_impl() const override { return new Draws(host.clone()); }
};

struct CUDAHooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  int getNumGPUs() const override { return 1; }
  Device getDeviceFromPtr(void*) const override { return GPU; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &device_memory; }
  void deviceSynchronize(DeviceIndex) const override {}
  const at::Generator& getDefaultGenerator(DeviceIndex) const override {
    static const at::Generator draws = at::make_generator<Draws>(at::detail::getDefaultCPUGenerator());
    return draws;
  }
  at::Generator getNewGenerator(DeviceIndex) const override {
    return at::make_generator<Draws>(at::detail::createCPUGenerator());
  }
};
static_assert(sizeof(CUDAHooks) == sizeof(at::CUDAHooksInterface), "one takes the place of the other");

// --- waits of the host ---
void (*on_wait)(const char*, const char*) = nullptr;
void wait(const char* kind, const std::string& name) {
  if (on_wait != nullptr) on_wait(kind, name.c_str());
}
// Operations whose result's shape or value the host must know before it goes on, and how often they wait.
const std::unordered_map<std::string, int> WAITS{
    {"aten::_local_scalar_dense", 1}, {"aten::nonzero", 1}, {"aten::masked_select", 1}, {"aten::_unique2", 1},
    {"aten::unique_dim", 1}, {"aten::unique_consecutive", 1}, {"aten::bincount", 1}, {"aten::equal", 1},
    {"aten::repeat_interleave", 1}, {"aten::multinomial", 1}};

// --- one operation ---
bool on_gpu(const Tensor& tensor) { return tensor.defined() && tensor.is_cuda(); }
struct Call {
  const std::string name;
  std::unordered_map<c10::StorageImpl*, Storage> host_of, gpu_of;
  std::vector<std::pair<Tensor, Tensor>> wrapped;  // (device, host)
  bool counts_booleans = true;

  Storage host(const Storage& gpu) {
    auto known = host_of.find(gpu.unsafeGetStorageImpl());
    if (known != host_of.end()) return known->second;
    auto keep = [](void* storage) { delete static_cast<Storage*>(storage); };
    c10::DataPtr bytes(gpu.mutable_data(), new Storage(gpu), keep, HOST);
    Storage made(Storage::use_byte_size_t(), gpu.nbytes(), std::move(bytes), c10::GetCPUAllocator(), true);
    host_of.emplace(gpu.unsafeGetStorageImpl(), made);
    gpu_of.emplace(made.unsafeGetStorageImpl(), gpu);
    return made;
  }
  // What a kernel allocated becomes memory of the device.
  Storage gpu(const Storage& host) {
    auto known = gpu_of.find(host.unsafeGetStorageImpl());
    if (known != gpu_of.end()) return known->second;
    auto keep = [](void* storage) { delete static_cast<Storage*>(storage); };
    c10::DataPtr bytes(host.mutable_data(), new Storage(host), keep, HOST);
    Storage made(Storage::use_byte_size_t(), host.nbytes(), named_gpu(std::move(bytes), host.nbytes()), &device_memory, true);
    gpu_of.emplace(host.unsafeGetStorageImpl(), made);
    return made;
  }
  static Tensor over(const Storage& storage, const Tensor& like, DispatchKey key) {
    auto made = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), DispatchKeySet(key), like.dtype());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
    if (like.is_conj()) made._set_conj(true);
    if (like.is_neg()) made._set_neg(true);
    return made;
  }
  Tensor to_host(const Tensor& tensor, bool index = false) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_cuda()) {
      TORCH_CHECK(tensor.dim() == 0 || index, "Expected all tensors to be on the same device, but ", name, " was given ",
                  tensor.sizes(), " on ", tensor.device(), " beside cuda:0");
      return tensor;
    }
    for (auto& [device, host] : wrapped)
      if (device.is_same(tensor)) return host;
    wrapped.emplace_back(tensor, over(host(tensor.storage()), tensor, DispatchKey::CPU));
    return wrapped.back().second;
  }
  Tensor to_gpu(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cpu()) return tensor;
    for (auto& [device, host] : wrapped)
      if (host.is_same(tensor)) return device;
    return over(gpu(tensor.storage()), tensor, DispatchKey::CUDA);
  }
  // Operations in place may have resized what they were given, or given it other storage.
  void follow() {
    for (auto& [device, host] : wrapped) {
      auto* impl = device.unsafeGetTensorImpl();
      if (host.storage().unsafeGetStorageImpl() != host_of.at(device.storage().unsafeGetStorageImpl()).unsafeGetStorageImpl())
        impl->set_storage_keep_dtype(gpu(host.storage()));
      else if (host.storage().data() != device.storage().data())
        impl->set_storage_keep_dtype(grown(device.storage(), host.storage()));
      if (host.sizes() != device.sizes() || host.strides() != device.strides() ||
          host.storage_offset() != device.storage_offset())
        impl->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
    }
  }
  Storage grown(const Storage& device, const Storage& host) {
    auto keep = [](void* storage) { delete static_cast<Storage*>(storage); };
    c10::DataPtr bytes(host.mutable_data(), new Storage(host), keep, HOST);
    device.unsafeGetStorageImpl()->set_data_ptr_noswap(named_gpu(std::move(bytes), host.nbytes()));
    device.unsafeGetStorageImpl()->set_nbytes(host.nbytes());
    return device;
  }
  IValue argument(const IValue& value) {
    const bool index = name.find("index") != std::string::npos;
    if (value.isTensor()) return to_host(value.toTensor());
    if (value.isDevice() && value.toDevice().is_cuda()) return HOST;
    if (value.isStorage() && value.toStorage().device().is_cuda()) return host(value.toStorage());
    if (value.isGenerator() && value.toGenerator().device().is_cuda())
      return static_cast<Draws*>(value.toGenerator().unsafeGetGeneratorImpl())->host;
    if (value.isTensorList()) {
      c10::List<Tensor> host;
      for (const Tensor& tensor : value.toTensorVector()) host.push_back(to_host(tensor));
      return host;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> host;
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector()) {
        if (counts_booleans && tensor && on_gpu(*tensor) && (tensor->scalar_type() == at::kBool || tensor->scalar_type() == at::kByte))
          wait("wait", name + " with booleans");
        host.push_back(tensor ? std::optional(to_host(*tensor, index)) : tensor);
      }
      return host;
    }
    return value;
  }
  IValue result(const IValue& value) {
    if (value.isTensor()) return to_gpu(value.toTensor());
    if (value.isTensorList()) {
      c10::List<Tensor> device;
      for (const Tensor& tensor : value.toTensorVector()) device.push_back(to_gpu(tensor));
      return device;
    }
    return value;
  }
};

void on_host(const c10::OperatorHandle& op, DispatchKeySet, Stack* stack) {
  Call call{op.schema().name()};
  if (auto known = WAITS.find(call.name); known != WAITS.end())
    // With `output_size` nothing is asked of the device.
    if (call.name != "aten::repeat_interleave" || stack->back().isNone()) wait("wait", call.name);
  const size_t first = stack->size() - op.schema().arguments().size();
  // One number written through a mask is `masked_fill`: nobody needs to know how many places there are.
  if (call.name == "aten::_index_put_impl_") call.counts_booleans = on_gpu((*stack)[first + 2].toTensor());
  for (size_t i = first; i < stack->size(); i++) (*stack)[i] = call.argument((*stack)[i]);
  at::AutoDispatchBelowADInplaceOrView below;
  op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
  call.follow();
  for (size_t i = stack->size() - op.schema().returns().size(); i < stack->size(); i++)
    (*stack)[i] = call.result((*stack)[i]);
}

Tensor& copy(Tensor& self, const Tensor& src, bool non_blocking) {
  // Memory that is not pinned is read before the call returns, and written before it, whatever `non_blocking` says of it.
  if (src.numel() > 0 && on_gpu(src) && self.is_cpu() && !(non_blocking && is_pinned(self.data_ptr()))) wait("wait", "to host");
  if (src.numel() > 0 && on_gpu(self) && src.is_cpu() && !non_blocking) wait("upload", "to device");
  Call call{"aten::copy_"};
  auto host = [&](const Tensor& tensor) { return on_gpu(tensor) ? call.to_host(tensor) : tensor; };
  at::AutoDispatchBelowADInplaceOrView below;
  Tensor to = host(self);
  to.copy_(host(src));
  return self;
}
void record_stream(Tensor&, Stream) {}
bool pinned_tensor(const Tensor& self, std::optional<Device>) { return self.is_cpu() && is_pinned(self.storage().data()); }

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&on_host>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("copy_", copy);
  library.impl("record_stream", record_stream);
  // Written once for all devices, by a look at which one it is.
  for (const char* name : {"convolution", "convolution_backward", "_convolution"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&on_host>());
  // What torch would compose of other operations where a device has no kernel, but has one for the CPU.
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& known : dispatcher.getAllOpNames()) {
    auto op = dispatcher.findOp(known);
    if (known.name.rfind("aten::", 0) != 0 || !op || !op->hasSchema() || !op->hasKernelForDispatchKey(DispatchKey::CPU) ||
        op->hasKernelForDispatchKey(DispatchKey::CUDA))
      continue;
    const std::string full = known.overload_name.empty() ? known.name : known.name + "." + known.overload_name;
    library.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&on_host>());
  }
}
const bool registered = [] {
  c10::SetAllocator(c10::kCUDA, &device_memory, 1);
  // `import torch` has asked for the hooks and been given those of a wheel without CUDA, once for all.
  new (const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks())) CUDAHooks();
  return true;
}();
}  // namespace

extern "C" {
void pretended_on_wait(void (*callback)(const char*, const char*)) { on_wait = callback; }
int64_t pretended_allocated() { return allocated; }
int64_t pretended_most_allocated() { return most_allocated; }
void pretended_reset_peak() { most_allocated = allocated.load(); }
}
