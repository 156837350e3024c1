"""What a CUDA graph does, on a CPU: a step is recorded once as a list of kernels on addresses, and only those run again."""

from __future__ import annotations

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

ASKING = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique2", "equal", "is_nonzero", "item")
READING = {"item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "__len__"} - {"__len__"}


class AskedTheHost(RuntimeError):
    """The step needs a value on the host: a capture cannot hold that."""


class _Record(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(word == func.overloadpacket.__name__ for word in ASKING):
            raise AskedTheHost(str(func))
        if func.overloadpacket.__name__ == "index_put_" or func.overloadpacket.__name__ == "index":
            indices = [i for i in args[1] if i is not None]
            if any(i.dtype == torch.bool for i in indices):
                raise AskedTheHost(f"{func} with a mask")
        out = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, out))
        return out


class NoReading(TorchFunctionMode):
    """Refuses what reads a tensor's values on the host, and counts."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in READING:
            self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


class Graph:
    """Recorded kernels. A view costs nothing again, a kernel writes where it wrote before."""

    def __init__(self, step):
        record, reading = _Record(), NoReading()
        with record, reading:
            step()
        if reading.seen:
            raise AskedTheHost(str(reading.seen))
        self.calls = record.calls
        self.addresses = [t.data_ptr() for call in self.calls for t in self._tensors(call)]

    @staticmethod
    def _tensors(call):
        return [x for x in tree_flatten(call[1:])[0] if isinstance(x, torch.Tensor)]

    def replay(self):
        assert self.addresses == [t.data_ptr() for call in self.calls for t in self._tensors(call)]
        with torch.no_grad():
            for func, args, kwargs, out in self.calls:
                if func.is_view:
                    continue
                again = func(*args, **kwargs)
                for old, new in zip(tree_flatten(out)[0], tree_flatten(again)[0], strict=True):
                    if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)


class RecordedGraphs:
    """Stands in for `posttrain.rollouts.native.graphs.CudaGraphs`."""

    def __init__(self):
        self.graphs = {}
        self.captured = []
        self.replayed = 0
        self.forgotten = 0

    def __call__(self, key, step, parked):
        if key not in self.graphs:
            with parked():
                step()  # Warm-up.
                self.graphs[key] = Graph(step)
            self.captured.append(key)
        self.graphs[key].replay()
        self.replayed += 1

    def forget(self):
        self.graphs.clear()
        self.forgotten += 1
