// One step of generation: the next token of every sequence, from its embedding to its logits, in one call.
//
// Weights lie in panels of 32 outputs, [panel][in][32], so that a product reads them once, in order. Every sum over the
// inputs is taken in their order, whatever the number of rows: a row's numbers do not depend on the others. Activations
// are fp32; where the model is bf16 they are rounded wherever the modules round them. models/compiled.py has the same
// structures.
//
// Shapes: B rows, D hidden, F feed-forward width, H heads, G key and value heads, R = H / G, S keys, C room, K head_dim.

#include <cmath>
#include <cstdint>
#include <cstring>
#ifdef _OPENMP
#include <omp.h>
#endif

namespace {

typedef float Wide __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Bits __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));

constexpr long LANES = 16, PANEL = 32, AHEAD = 2048;
constexpr int MOST_ROWS = 8;  // rows multiplied with a panel at a time: their sums fit the registers

enum Activation : long { SILU = 0, GELU_TANH = 1 };

constexpr int PAIRED = 2;     // as few rows: two panels at a time

struct Bf16 {
    uint16_t bits;
};

inline Wide load(const float* from) {
    Wide v;
    memcpy(&v, from, sizeof v);
    return v;
}

inline Wide load(const Bf16* from) {
    Halves half;
    memcpy(&half, from, sizeof half);
    return (Wide)(__builtin_convertvector(half, Bits) << 16);
}

inline float number(float x) { return x; }

inline float number(Bf16 x) {
    uint32_t bits = (uint32_t)x.bits << 16;
    float wide;
    memcpy(&wide, &bits, 4);
    return wide;
}

inline Bf16 to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return {0x7fc0};
    return {(uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

inline void put(float* to, float x) { *to = x; }
inline void put(Bf16* to, float x) { *to = to_bf16(x); }

template <class W>
inline float rounded(float x);
template <>
inline float rounded<float>(float x) { return x; }
template <>
inline float rounded<Bf16>(float x) { return number(to_bf16(x)); }

inline Wide all(float x) { return Wide{} + x; }

// e to the x, within 2 units in the last place: 2^n by the exponent's bits, the rest by a polynomial (Cephes).
inline Wide exponential(Wide x) {
    x = x > all(88.3f) ? all(88.3f) : x;
    x = x < all(-87.3f) ? all(-87.3f) : x;
    Wide turns = x * 1.44269504088896341f;
    Ints n = __builtin_convertvector(turns + (turns < all(0) ? all(-0.5f) : all(0.5f)), Ints);
    Wide whole = __builtin_convertvector(n, Wide);
    x = x - whole * 0.693359375f;
    x = x + whole * 2.12194440e-4f;
    Wide y = all(1.9875691500e-4f);
    y = y * x + 1.3981999507e-3f;
    y = y * x + 8.3334519073e-3f;
    y = y * x + 4.1665795894e-2f;
    y = y * x + 1.6666665459e-1f;
    y = y * x + 5.0000001201e-1f;
    y = y * x * x + x + 1.0f;
    return y * (Wide)((n + 127) << 23);
}

inline float sum(Wide v) {
    float s = 0;
    for (int i = 0; i < LANES; i++) s += v[i];
    return s;
}

}  // namespace

extern "C" {

struct Matrix {
    const void* weight;
    const float* bias;
    long out, in;
};

struct Norm {
    const float *weight, *bias;  // no bias: RMSNorm; no weight: none
    float eps;
};

struct Layer {
    Norm before, between, q_norm, k_norm;
    Matrix qkv, out, gate, up, down;
};

struct Model {
    const void *embeddings, *positions;
    const Layer* layers;
    Norm last;
    Matrix head;
    long count, hidden, heads, groups, width, ffn, window, is_bf16, activation;
};

struct Step {
    void* const* caches;  // of each layer [2, M, G, C, K]
    long cache_rows, room, rows, threads, scratch;
    const int64_t *tokens, *places;
    const float *cos, *sin;  // [positions, K / 2]; null: learned positions
    float* memory;           // B * (3 D + heads' and ffn's widths), then threads * scratch
    float* logits;           // [B, V]
};

}  // extern "C"

namespace {

enum Ending { STORED, ADDED };

template <class W, int B, int P>
inline void panels(const W* weight, long apart, const float* x, long in, float sums[P][B][PANEL]) {
    Wide left[P][B] = {}, right[P][B] = {};
    for (long d = 0; d < in; d++) {
        for (int p = 0; p < P; p++) {
            const W* at = weight + p * apart + d * PANEL;
            __builtin_prefetch((const char*)at + AHEAD);
            if (sizeof(W) == 4) __builtin_prefetch((const char*)at + AHEAD + 64);
            const Wide first = load(at), second = load(at + LANES);
            for (int b = 0; b < B; b++) {
                left[p][b] += first * x[b * in + d];
                right[p][b] += second * x[b * in + d];
            }
        }
    }
    for (int p = 0; p < P; p++)
        for (int b = 0; b < B; b++) {
            memcpy(sums[p][b], &left[p][b], sizeof(Wide));
            memcpy(sums[p][b] + LANES, &right[p][b], sizeof(Wide));
        }
}

template <class W, int B, int P>
void some(const Matrix& m, long panel, const float* x, float* y, Ending ending) {
    float sums[P][B][PANEL];
    const long apart = m.in * PANEL;
    panels<W, B, P>((const W*)m.weight + panel * apart, apart, x, m.in, sums);
    for (int p = 0; p < P; p++) {
        const long begin = (panel + p) * PANEL, count = m.out - begin < PANEL ? m.out - begin : PANEL;
        for (int b = 0; b < B; b++)
            for (long i = 0; i < count; i++) {
                float v = rounded<W>(sums[p][b][i] + (m.bias ? m.bias[begin + i] : 0));
                float* to = y + b * m.out + begin + i;
                *to = ending == ADDED ? rounded<W>(*to + v) : v;
            }
    }
}

template <class W, int P>
void some_rows(const Matrix& m, long panel, const float* x, float* y, long rows, Ending ending) {
    for (long b = 0; b < rows; b += MOST_ROWS) {
        const float* from = x + b * m.in;
        float* to = y + b * m.out;
        if (P > 1) {  // at most PAIRED rows
            rows == 1 ? some<W, 1, P>(m, panel, from, to, ending) : some<W, 2, P>(m, panel, from, to, ending);
            continue;
        }
        switch (rows - b) {
            case 1: some<W, 1, 1>(m, panel, from, to, ending); break;
            case 2: some<W, 2, 1>(m, panel, from, to, ending); break;
            case 3: some<W, 3, 1>(m, panel, from, to, ending); break;
            case 4: some<W, 4, 1>(m, panel, from, to, ending); break;
            case 5: some<W, 5, 1>(m, panel, from, to, ending); break;
            case 6: some<W, 6, 1>(m, panel, from, to, ending); break;
            case 7: some<W, 7, 1>(m, panel, from, to, ending); break;
            default: some<W, MOST_ROWS, 1>(m, panel, from, to, ending);
        }
    }
}

struct Share {
    long me, threads;
    long begin(long count) const { return count * me / threads; }
    long end(long count) const { return count * (me + 1) / threads; }
};

long panels_of(const Matrix& m) { return (m.out + PANEL - 1) / PANEL; }

// y = x W^T + b, or y += ..., for this thread's panels.
template <class W>
void product(const Matrix& m, const float* x, float* y, long rows, Ending ending, Share share) {
    long panel = share.begin(panels_of(m));
    const long end = share.end(panels_of(m));
    if (rows <= PAIRED)  // few sums: two panels hide the latency of adding
        for (; panel + 2 <= end; panel += 2) some_rows<W, 2>(m, panel, x, y, rows, ending);
    for (; panel < end; panel++) some_rows<W, 1>(m, panel, x, y, rows, ending);
}

template <class W>
void normalize(const Norm& norm, const float* x, float* y, long count) {
    float mean = 0, square = 0;
    if (norm.bias) {
        for (long i = 0; i < count; i++) mean += x[i];
        mean /= count;
    }
    Wide squares = {};
    long i = 0;
    for (; i + LANES <= count; i += LANES) {
        Wide v = load(x + i) - mean;
        squares += v * v;
    }
    square = sum(squares);
    for (; i < count; i++) square += (x[i] - mean) * (x[i] - mean);
    const float scale = 1 / sqrtf(square / count + norm.eps);
    for (long j = 0; j < count; j++) {
        float v = (x[j] - mean) * scale * norm.weight[j];
        y[j] = rounded<W>(norm.bias ? v + norm.bias[j] : v);
    }
}

template <class W>
void turn(float* x, const float* cos, const float* sin, long width) {
    const long half = width / 2;
    for (long i = 0; i < half; i++) {
        const float a = x[i], b = x[i + half];
        x[i] = rounded<W>(a * cos[i] - b * sin[i]);
        x[i + half] = rounded<W>(b * cos[i] + a * sin[i]);
    }
}

// One sequence's query heads that share keys: the outputs take the queries' place.
template <class W>
void attend(const Model& model, const Layer& layer, const Step& step, W* cache, long row, long group, float* heads,
            float* scores) {
    const long K = model.width, R = model.heads / model.groups, place = step.places[row];
    const long first = model.window && place + 1 > model.window ? place + 1 - model.window : 0, S = place + 1 - first;
    float* q = heads + group * R * K;
    float* k = heads + (model.heads + group) * K;
    float* v = heads + (model.heads + model.groups + group) * K;
    if (layer.q_norm.weight) {
        for (long r = 0; r < R; r++) normalize<W>(layer.q_norm, q + r * K, q + r * K, K);
        normalize<W>(layer.k_norm, k, k, K);
    }
    if (step.cos) {
        const float *cos = step.cos + place * (K / 2), *sin = step.sin + place * (K / 2);
        for (long r = 0; r < R; r++) turn<W>(q + r * K, cos, sin, K);
        turn<W>(k, cos, sin, K);
    }
    W* keys = cache + (row * model.groups + group) * step.room * K;
    W* values = keys + step.cache_rows * model.groups * step.room * K;
    for (long i = 0; i < K; i++) {
        put(keys + place * K + i, k[i]);
        put(values + place * K + i, v[i]);
    }
    keys += first * K;
    values += first * K;
    const float scale = 1 / sqrtf((float)K);
    const long padded = (S + LANES - 1) / LANES * LANES, vectors = K / LANES * LANES;
    for (long s = 0; s < S; s++)
        for (long r = 0; r < R; r++) {
            Wide dots = {};
            for (long i = 0; i < vectors; i += LANES) dots += load(q + r * K + i) * load(keys + s * K + i);
            float dot = sum(dots);
            for (long i = vectors; i < K; i++) dot += q[r * K + i] * number(keys[s * K + i]);
            scores[r * padded + s] = dot * scale;
        }
    for (long r = 0; r < R; r++) {
        float* row_scores = scores + r * padded;
        float most = -INFINITY;
        for (long s = 0; s < S; s++) most = row_scores[s] > most ? row_scores[s] : most;
        for (long s = S; s < padded; s++) row_scores[s] = -INFINITY;
        float total = 0;
        for (long s = 0; s < padded; s += LANES) {
            Wide p = exponential(load(row_scores + s) - most);
            memcpy(row_scores + s, &p, sizeof p);
            for (long i = s; i < s + LANES && i < S; i++) total += row_scores[i];
        }
        float* y = q + r * K;
        for (long i = 0; i < vectors; i += LANES) {
            Wide sums = {};
            for (long s = 0; s < S; s++) sums += load(values + s * K + i) * row_scores[s];
            for (long j = 0; j < LANES; j++) y[i + j] = rounded<W>(sums[j] / total);
        }
        for (long i = vectors; i < K; i++) {
            float one = 0;
            for (long s = 0; s < S; s++) one += number(values[s * K + i]) * row_scores[s];
            y[i] = rounded<W>(one / total);
        }
    }
}

// The activation of the gates, times ups where there are any, into the gates' place.
template <class W>
void activate(Activation activation, float* gate, const float* up, long count) {
    for (long i = 0; i < count; i += LANES) {
        const long n = count - i < LANES ? count - i : LANES;
        Wide x = {};
        memcpy(&x, gate + i, n * sizeof(float));
        // gelu: x (1 + tanh u) / 2 is x sigmoid(2 u)
        Wide u = activation == SILU ? x : 1.5957691216057308f * (x + 0.044715f * x * x * x);
        Wide y = x / (exponential(-u) + 1.0f);
        for (long j = 0; j < n; j++) gate[i + j] = up ? rounded<W>(rounded<W>(y[j]) * up[i + j]) : rounded<W>(y[j]);
    }
}

template <class W>
void compute(const Model& model, const Step& step) {
    const long B = step.rows, D = model.hidden, H = model.heads, G = model.groups, K = model.width, F = model.ffn;
    const long wide = (H + 2 * G) * K;
    float *x = step.memory, *h = x + B * D, *heads = h + B * D, *attended = heads + B * wide;
    float *gates = attended + B * H * K, *ups = gates + B * F, *scores = ups + B * F;
#pragma omp parallel num_threads((int)step.threads)
    {
#ifdef _OPENMP
        const Share share = {omp_get_thread_num(), omp_get_num_threads()};
#else
        const Share share = {0, 1};
#endif
        const long begin = share.begin(B), end = share.end(B);
        float* mine = scores + share.me * step.scratch;
        for (long b = begin; b < end; b++)
            for (long i = 0; i < D; i++) {
                float v = number(((const W*)model.embeddings)[step.tokens[b] * D + i]);
                if (model.positions) v = rounded<W>(v + number(((const W*)model.positions)[step.places[b] * D + i]));
                x[b * D + i] = v;
            }
        for (long l = 0; l < model.count; l++) {
            const Layer& layer = model.layers[l];
#pragma omp barrier
            for (long b = begin; b < end; b++) normalize<W>(layer.before, x + b * D, h + b * D, D);
#pragma omp barrier
            product<W>(layer.qkv, h, heads, B, STORED, share);
#pragma omp barrier
            for (long task = share.begin(B * G); task < share.end(B * G); task++) {
                const long b = task / G, g = task % G, R = H / G;
                attend<W>(model, layer, step, (W*)step.caches[l], b, g, heads + b * wide, mine);
                memcpy(attended + b * H * K + g * R * K, heads + b * wide + g * R * K, R * K * sizeof(float));
            }
#pragma omp barrier
            product<W>(layer.out, attended, x, B, ADDED, share);
#pragma omp barrier
            for (long b = begin; b < end; b++) normalize<W>(layer.between, x + b * D, h + b * D, D);
#pragma omp barrier
            product<W>(layer.gate, h, gates, B, STORED, share);
            if (layer.up.weight) product<W>(layer.up, h, ups, B, STORED, share);
            const long count = panels_of(layer.gate), from = share.begin(count) * PANEL;
            const long to = share.end(count) * PANEL < F ? share.end(count) * PANEL : F;
            for (long b = 0; b < B && from < to; b++)
                activate<W>((Activation)model.activation, gates + b * F + from, layer.up.weight ? ups + b * F + from : nullptr, to - from);
#pragma omp barrier
            product<W>(layer.down, gates, x, B, ADDED, share);
        }
#pragma omp barrier
        for (long b = begin; b < end; b++) normalize<W>(model.last, x + b * D, h + b * D, D);
#pragma omp barrier
        product<W>(model.head, h, step.logits, B, STORED, share);
    }
}

}  // namespace

extern "C" void decode(const Model* model, const Step* step) {
    if (model->is_bf16)
        compute<Bf16>(*model, *step);
    else
        compute<float>(*model, *step);
}
