/* What a decoder layer does between its matrix products, for the few rows of a decoding step, in float32.
 *
 * Between two products torch runs some ten operations on a few kilobytes each, and what they cost is being called. Here a
 * step needs four calls a layer. Compiled for one head size, so that the compiler unrolls what runs over it.
 *
 * A row of `qkv` is (heads + 2 kv) x SIZE: queries, keys, values. Threads are OpenMP's, those that torch's products use.
 */

#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#else
static int omp_get_thread_num(void) { return 0; }
#endif

#ifndef SIZE
#define SIZE 64 /* Elements of a head. */
#endif
#if SIZE % 16 == 0 && defined(__AVX512F__)
#define LANES 16
#elif SIZE % 8 == 0 && defined(__AVX__)
#define LANES 8
#else
#define LANES 4 /* A head size is a multiple of it. */
#endif
#define VECTORS (SIZE / LANES)
#define TOGETHER 4       /* Queries that share a read of a value. */
#define TILE 32          /* Keys or values that stay in the first cache while all queries meet them. */
#define SMALL (1L << 14)  /* Elements below which waking a second thread costs more than it does. */

typedef float vector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef float four __attribute__((vector_size(16)));
typedef int32_t places __attribute__((vector_size(4 * LANES)));
#ifdef __clang__
#define CHOSEN(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define CHOSEN(a, b, ...) __builtin_shuffle(a, b, (places){__VA_ARGS__})
#endif
/* The same four places, of a below LANES and of b from there, in every quarter of 16 bytes. */
#define QUARTER(n, i, j, k, l) (n) + (i), (n) + (j), (n) + (k), (n) + (l)
#if LANES == 16
#define EACH(i, j, k, l) QUARTER(0, i, j, k, l), QUARTER(4, i, j, k, l), QUARTER(8, i, j, k, l), QUARTER(12, i, j, k, l)
#elif LANES == 8
#define EACH(i, j, k, l) QUARTER(0, i, j, k, l), QUARTER(4, i, j, k, l)
#else
#define EACH(i, j, k, l) QUARTER(0, i, j, k, l)
#endif

/* e^x for x <= 88, to 1 part in 10^7, and 0 below -87: x = n ln 2 + f with |f| <= ln 2 / 2, and a polynomial in f (Cephes,
 * expf). A library's would be called element by element. */
static inline float exponential(float x) {
    float some = x < -87.0f ? 0.0f : 1.0f;
    x = x < -87.0f ? -87.0f : x;
    float n = floorf(x * 1.44269504f + 0.5f);
    float f = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * f + 1.3981999507e-3f;
    p = p * f + 8.3334519073e-3f;
    p = p * f + 4.1665795894e-2f;
    p = p * f + 1.6666665459e-1f;
    p = p * f + 5.0000001201e-1f;
    p = p * f * f + f + 1.0f;
    int32_t bits = ((int32_t)n + 127) << 23;
    float scale;
    memcpy(&scale, &bits, sizeof scale);
    return p * scale * some;
}

/* x += added where there is something to add; out = x / sqrt(mean(x^2) + eps) * weight, over rows of `width`. */
void normalise(float *restrict x, const float *restrict added, const float *restrict weight, float *restrict out,
               long rows, long width, float eps, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * width > SMALL)
    for (long row = 0; row < rows; row++) {
        float *restrict mine = x + row * width, *restrict to = out + row * width;
        float squares = 0;
        if (added) {
            const float *restrict more = added + row * width;
#pragma omp simd
            for (long i = 0; i < width; i++) mine[i] += more[i];
        }
#pragma omp simd reduction(+ : squares)
        for (long i = 0; i < width; i++) squares += mine[i] * mine[i];
        float factor = 1.0f / sqrtf(squares / width + eps);
#pragma omp simd
        for (long i = 0; i < width; i++) to[i] = mine[i] * factor * weight[i];
    }
}

/* out = silu(gate) * up, where a row of `both` is gate and up, `width` each. */
void gated(const float *restrict both, float *restrict out, long rows, long width, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * width > SMALL)
    for (long row = 0; row < rows; row++) {
        const float *restrict gate = both + 2 * row * width, *restrict up = gate + width;
        float *restrict to = out + row * width;
#pragma omp simd
        for (long i = 0; i < width; i++) {
            float e = exponential(-fabsf(gate[i])); /* Never overflows: silu(x) = x / (1 + e^-x) = x e^x / (1 + e^x). */
            to[i] = gate[i] * (gate[i] < 0 ? e : 1.0f) / (1.0f + e) * up[i];
        }
    }
}

static inline void normalised_head(float *restrict x, const float *restrict weight, float eps) {
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int i = 0; i < SIZE; i++) squares += x[i] * x[i];
    float factor = 1.0f / sqrtf(squares / SIZE + eps);
#pragma omp simd
    for (int i = 0; i < SIZE; i++) x[i] *= factor * weight[i];
}

/* Rotate queries and keys in place by the angles of their rows' positions, halves against each other; first normalise
 * each head where the model does. `cosine` and `sine` are (rows, SIZE). */
void rotate(float *restrict qkv, const float *restrict cosine, const float *restrict sine, const float *restrict query_norm,
            const float *restrict key_norm, long rows, long heads, long kv, float eps, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * heads * SIZE > SMALL)
    for (long row = 0; row < rows; row++) {
        const float *restrict c = cosine + row * SIZE, *restrict s = sine + row * SIZE;
        for (long head = 0; head < heads + kv; head++) {
            float *restrict x = qkv + (row * (heads + 2 * kv) + head) * SIZE;
            const float *norm = head < heads ? query_norm : key_norm;
            if (norm) normalised_head(x, norm, eps);
#pragma omp simd
            for (int i = 0; i < SIZE / 2; i++) {
                float a = x[i], b = x[i + SIZE / 2];
                x[i] = a * c[i] - b * s[i];
                x[i + SIZE / 2] = b * c[i + SIZE / 2] + a * s[i + SIZE / 2];
            }
        }
    }
}

/* The sums of the elements of a, b, c and d: three rounds of halving, all four at once. */
static inline four totals(vector a, vector b, vector c, vector d) {
    vector ab = CHOSEN(a, b, EACH(0, LANES, 1, LANES + 1)) + CHOSEN(a, b, EACH(2, LANES + 2, 3, LANES + 3));
    vector cd = CHOSEN(c, d, EACH(0, LANES, 1, LANES + 1)) + CHOSEN(c, d, EACH(2, LANES + 2, 3, LANES + 3));
    vector all = CHOSEN(ab, cd, EACH(0, 1, LANES, LANES + 1)) + CHOSEN(ab, cd, EACH(2, 3, LANES + 2, LANES + 3));
    four quarters[LANES / 4], sum;
    memcpy(quarters, &all, sizeof all);
    sum = quarters[0];
    for (int i = 1; i < LANES / 4; i++) sum += quarters[i];
    return sum;
}

static inline vector product(const vector *restrict a, const vector *restrict b) {
    vector sum = a[0] * b[0];
#pragma GCC unroll 16
    for (int i = 1; i < VECTORS; i++) sum += a[i] * b[i];
    return sum;
}

/* scores[q][t] = queries[q] . keys[t], for `count` keys and `many` queries whose scores are `apart` elements apart. */
static void products(const float *restrict queries, long many, const float *restrict keys, long count,
                     float *restrict scores, long apart) {
    for (long begin = 0; begin < count; begin += TILE) {
        long end = begin + TILE < count ? begin + TILE : count;
        for (long q = 0; q < many; q++) {
            const vector *a = (const vector *)(queries + q * SIZE);
            float *to = scores + q * apart;
            long t = begin;
            for (; t + 4 <= end; t += 4) {
                const vector *k = (const vector *)(keys + t * SIZE);
                four sum = totals(product(a, k), product(a, k + VECTORS), product(a, k + 2 * VECTORS),
                                  product(a, k + 3 * VECTORS));
                memcpy(to + t, &sum, sizeof sum);
            }
            for (; t < end; t++) {
                vector none = {0};
                to[t] = totals(product(a, (const vector *)(keys + t * SIZE)), none, none, none)[0];
            }
        }
    }
}

/* out[q] += sum_t weights[q][t] values[t] over some values, for `some` queries, a number known to the compiler. */
static inline void sums_of(const int some, const float *restrict weights, long apart, const float *restrict values,
                           long count, float *restrict out) {
    vector sum[TOGETHER][VECTORS];
    vector *to = (vector *)out;
#pragma GCC unroll 4
    for (int j = 0; j < some; j++)
#pragma GCC unroll 16
        for (int i = 0; i < VECTORS; i++) sum[j][i] = to[j * VECTORS + i];
    for (long t = 0; t < count; t++) {
        const vector *v = (const vector *)(values + t * SIZE);
#pragma GCC unroll 4
        for (int j = 0; j < some; j++) {
            float weight = weights[j * apart + t];
#pragma GCC unroll 16
            for (int i = 0; i < VECTORS; i++) sum[j][i] += weight * v[i];
        }
    }
#pragma GCC unroll 4
    for (int j = 0; j < some; j++)
#pragma GCC unroll 16
        for (int i = 0; i < VECTORS; i++) to[j * VECTORS + i] = sum[j][i];
}

/* out[q] += sum_t weights[q][t] values[t]. */
static void sums(const float *restrict weights, long many, long apart, const float *restrict values, long count,
                 float *restrict out) {
    for (long begin = 0; begin < count; begin += TILE) {
        long some = begin + TILE < count ? TILE : count - begin, q = 0;
        const float *w = weights + begin, *v = values + begin * SIZE;
        for (; SIZE <= 128 && q + TOGETHER <= many; q += TOGETHER)
            sums_of(TOGETHER, w + q * apart, apart, v, some, out + q * SIZE);
        for (; q < many; q++) sums_of(1, w + q * apart, apart, v, some, out + q * SIZE);
    }
}

static void softmax(float *restrict x, long count) {
    float most = -INFINITY, sum = 0;
#pragma omp simd reduction(max : most)
    for (long i = 0; i < count; i++) most = x[i] > most ? x[i] : most;
#pragma omp simd reduction(+ : sum)
    for (long i = 0; i < count; i++) {
        x[i] = exponential(x[i] - most);
        sum += x[i];
    }
    float factor = 1.0f / sum;
#pragma omp simd
    for (long i = 0; i < count; i++) x[i] *= factor;
}

/* What a step's rows read, the same for all layers but for the memory itself. */
struct step {
    long heads, kv;
    long common;           /* Tokens that all prompts begin with. */
    long longest;          /* Scores of the longest row. */
    long window;           /* Positions a token may look back, itself included; 0 is all. */
    long chunks;           /* Rows that read the same prompt, at most some at a time. */
    const long *begins;    /* (chunks + 1) where each chunk begins in `order`. */
    const long *order;     /* (rows) rows by prompt. */
    const long *prompt;    /* (rows) tokens of each row's prompt, behind the common ones. */
    const long *lengths;   /* (rows) tokens of its suffix so far, the current one not included. */
    const long *places;    /* (rows, 3) the prompt's block; where in it it begins; elements from a head to the next. */
    float *scratch;        /* (threads, most rows of a chunk x heads / kv, longest + 2 SIZE). */
    float scale;
    int threads;
};

/* One layer's memory. */
struct memory {
    const float *common_keys, *common_values;  /* (kv, common, SIZE). */
    const float *const *blocks;                /* (blocks, 2) keys and values of prompts, (P, kv, width, SIZE) each. */
    float *keys, *values;                      /* (slots, kv, capacity, SIZE): suffixes. */
    long capacity;
};

static void attend_chunk(const struct step *s, const struct memory *m, const float *qkv, float *out, long chunk, long head,
                         float *scratch) {
    long repeat = s->heads / s->kv, begin = s->begins[chunk], rows = s->begins[chunk + 1] - begin;
    long many = rows * repeat, apart = s->longest, first = s->order[begin], common = s->common, prompt = s->prompt[first];
    float *scores = scratch, *queries = scores + many * apart, *sum = queries + many * SIZE;
    const float *common_keys = m->common_keys + head * common * SIZE;
    const float *common_values = m->common_values + head * common * SIZE;
    const long *place = s->places + 3 * first, inside = place[1] + head * place[2];
    const float *keys = m->blocks[2 * place[0]] + inside, *values = m->blocks[2 * place[0] + 1] + inside;

    for (long j = 0; j < rows; j++) {
        const float *mine = qkv + s->order[begin + j] * (s->heads + 2 * s->kv) * SIZE;
        for (long i = 0; i < repeat * SIZE; i++) queries[j * repeat * SIZE + i] = mine[head * repeat * SIZE + i] * s->scale;
    }
    if (common) products(queries, many, common_keys, common, scores, apart);
    products(queries, many, keys, prompt, scores + common, apart);
    memset(sum, 0, many * SIZE * sizeof *sum);
    for (long j = 0; j < rows; j++) {
        long row = s->order[begin + j], length = s->lengths[row], whole = common + prompt + length + 1;
        long here = ((row * s->kv + head) * m->capacity + length) * SIZE;
        const float *mine = qkv + row * (s->heads + 2 * s->kv) * SIZE;
        float *own = scores + j * repeat * apart, *suffix_keys = m->keys + here - length * SIZE;
        memcpy(m->keys + here, mine + (s->heads + head) * SIZE, SIZE * sizeof(float));
        memcpy(m->values + here, mine + (s->heads + s->kv + head) * SIZE, SIZE * sizeof(float));
        products(queries + j * repeat * SIZE, repeat, suffix_keys, length + 1, own + common + prompt, apart);
        for (long q = 0; q < repeat; q++) {
            for (long t = 0; s->window && t < whole - s->window; t++) own[q * apart + t] = -INFINITY;
            softmax(own + q * apart, whole);
        }
        sums(own + common + prompt, repeat, apart, m->values + here - length * SIZE, length + 1, sum + j * repeat * SIZE);
    }
    if (common) sums(scores, many, apart, common_values, common, sum);
    sums(scores + common, many, apart, values, prompt, sum);
    for (long j = 0; j < rows; j++)
        memcpy(out + (s->order[begin + j] * s->heads + head * repeat) * SIZE, sum + j * repeat * SIZE,
               repeat * SIZE * sizeof(float));
}

/* Every row's new key and value go to its suffix, then its queries see what all share, its prompt and its suffix. */
void attend(const struct step *s, const struct memory *m, const float *qkv, float *out, long scratch_each) {
#pragma omp parallel for num_threads(s->threads) schedule(dynamic)
    for (long item = 0; item < s->chunks * s->kv; item++) {
        float *scratch = s->scratch + omp_get_thread_num() * scratch_each;
        attend_chunk(s, m, qkv, out, item / s->kv, item % s->kv, scratch);
    }
}
