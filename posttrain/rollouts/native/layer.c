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
#define TOGETHER 4        /* Queries that share a read of a key or value. */
#define SMALL (1L << 14)  /* Elements below which waking a second thread costs more than it does. */

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

/* scores[q][t] = queries[q] . keys[t], for `count` keys and `many` queries whose scores are `apart` elements apart. */
static void products(const float *restrict queries, long many, const float *restrict keys, long count,
                     float *restrict scores, long apart) {
    long q = 0;
    for (; q + TOGETHER <= many; q += TOGETHER) {
        const float *restrict a = queries + q * SIZE;
        for (long t = 0; t < count; t++) {
            const float *restrict k = keys + t * SIZE;
            float s0 = 0, s1 = 0, s2 = 0, s3 = 0;
#pragma omp simd reduction(+ : s0, s1, s2, s3)
            for (int i = 0; i < SIZE; i++) {
                s0 += a[i] * k[i];
                s1 += a[SIZE + i] * k[i];
                s2 += a[2 * SIZE + i] * k[i];
                s3 += a[3 * SIZE + i] * k[i];
            }
            scores[q * apart + t] = s0;
            scores[(q + 1) * apart + t] = s1;
            scores[(q + 2) * apart + t] = s2;
            scores[(q + 3) * apart + t] = s3;
        }
    }
    for (; q < many; q++)
        for (long t = 0; t < count; t++) {
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int i = 0; i < SIZE; i++) sum += queries[q * SIZE + i] * keys[t * SIZE + i];
            scores[q * apart + t] = sum;
        }
}

/* out[q] += sum_t weights[q][t] values[t]. */
static void sums(const float *restrict weights, long many, long apart, const float *restrict values, long count,
                 float *restrict out) {
    long q = 0;
    for (; q + TOGETHER <= many; q += TOGETHER) {
        float sum[TOGETHER][SIZE] = {{0}};
        const float *restrict w = weights + q * apart;
        for (long t = 0; t < count; t++) {
            const float *restrict v = values + t * SIZE;
            float w0 = w[t], w1 = w[apart + t], w2 = w[2 * apart + t], w3 = w[3 * apart + t];
#pragma omp simd
            for (int i = 0; i < SIZE; i++) {
                sum[0][i] += w0 * v[i];
                sum[1][i] += w1 * v[i];
                sum[2][i] += w2 * v[i];
                sum[3][i] += w3 * v[i];
            }
        }
        for (int j = 0; j < TOGETHER; j++)
            for (int i = 0; i < SIZE; i++) out[(q + j) * SIZE + i] += sum[j][i];
    }
    for (; q < many; q++) {
        float sum[SIZE] = {0};
        for (long t = 0; t < count; t++) {
            float w = weights[q * apart + t];
#pragma omp simd
            for (int i = 0; i < SIZE; i++) sum[i] += w * values[t * SIZE + i];
        }
        for (int i = 0; i < SIZE; i++) out[q * SIZE + i] += sum[i];
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
    long rows, heads, kv;
    long common;           /* Tokens that all prompts begin with. */
    long longest;          /* Scores of the longest row. */
    long window;           /* Positions a token may look back, itself included; 0 is all. */
    long chunks;           /* Rows that read the same prompt, at most some at a time. */
    const long *begins;    /* (chunks + 1) where each chunk begins in `order`. */
    const long *order;     /* (rows) rows by prompt. */
    const long *prompt;    /* (rows) tokens of each row's prompt, behind the common ones. */
    const long *lengths;   /* (rows) tokens of its suffix so far, the current one not included. */
    float *scratch;        /* (threads, most rows of a chunk x heads / kv, longest + 2 SIZE). */
    float scale;
    int threads;
};

/* One layer's memory. A prompt's keys of one head lie together; those of the next are `stride` elements further. */
struct memory {
    const float *common_keys, *common_values;  /* (kv, common, SIZE). */
    const int64_t *prompts;                    /* (rows, 3): addresses of a row's prompt's keys and values; the stride. */
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
    const float *keys = (const float *)m->prompts[3 * first] + head * m->prompts[3 * first + 2];
    const float *values = (const float *)m->prompts[3 * first + 1] + head * m->prompts[3 * first + 2];

    for (long j = 0; j < rows; j++) {
        const float *mine = qkv + s->order[begin + j] * (s->heads + 2 * s->kv) * SIZE;
        for (long i = 0; i < repeat * SIZE; i++) queries[j * repeat * SIZE + i] = mine[head * repeat * SIZE + i] * s->scale;
    }
    if (common) products(queries, many, common_keys, common, scores, apart);
    products(queries, many, keys, prompt, scores + common, apart);
    memset(sum, 0, many * SIZE * sizeof *sum);
    for (long j = 0; j < rows; j++) {
        long row = s->order[begin + j], length = s->lengths[row], whole = common + prompt + length + 1;
        long place = ((row * s->kv + head) * m->capacity + length) * SIZE;
        const float *mine = qkv + row * (s->heads + 2 * s->kv) * SIZE;
        float *own = scores + j * repeat * apart, *suffix_keys = m->keys + place - length * SIZE;
        memcpy(m->keys + place, mine + (s->heads + head) * SIZE, SIZE * sizeof(float));
        memcpy(m->values + place, mine + (s->heads + s->kv + head) * SIZE, SIZE * sizeof(float));
        products(queries + j * repeat * SIZE, repeat, suffix_keys, length + 1, own + common + prompt, apart);
        for (long q = 0; q < repeat; q++) {
            for (long t = 0; s->window && t < whole - s->window; t++) own[q * apart + t] = -INFINITY;
            softmax(own + q * apart, whole);
        }
        sums(own + common + prompt, repeat, apart, m->values + place - length * SIZE, length + 1, sum + j * repeat * SIZE);
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
