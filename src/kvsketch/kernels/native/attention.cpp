// Attention of a few queries per KV head over the slots of a layer, on a CPU.
//
// Slots in 8 or 4 bits become floats a few at a time, in the processor's first cache, and are never
// written to memory as floats. build.py compiles this file once for every set of vector
// instructions (KV_ISA names it); the copy with KV_DISPATCH chooses among them when it is loaded.
// No allocation per token: every thread keeps its working memory.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <utility>
#include <vector>
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__aarch64__)
#include <arm_neon.h>
#endif

// What Python fills in (native.py), all of it int64, in this order.
struct Side {            // the keys or the values of a part
  int64_t data;          // address of the exact rows, or of the codes
  int64_t row, slot;     // bytes from row to row of the batch, and from slot to slot
  int64_t kind;          // FLOAT32, BFLOAT16, FLOAT16, or 8 or 4 bits
  int64_t dim;           // channels
  int64_t step;          // address of the scales, float16 [.., slots, groups]
  int64_t small_row;     // elements from row to row of step
  int64_t groups, width; // channels that share a scale; both count padding
  int64_t unit, unit_row, unit_head;        // address and strides in elements; 0: all are 1
  int64_t offset, offset_row, offset_head;  // likewise; 0: all are 0
};
struct Part {
  Side keys, values;
  int64_t mass, mass_row;          // log masses, float32; address 0: all are 0
  int64_t positions, position_row; // float32; address 0: there are none
  int64_t score, score_row;        // float32; address 0: there are none
  int64_t start, start_row;        // int64 [rows, heads]; address 0: head * capacity
  int64_t sizes, sizes_row, sizes_head;  // int64 [rows, heads]; address 0: base in every head
  int64_t base, capacity, appended;
};
struct Call {
  int64_t parts, count;            // address of the addresses of parts; how many there are
  int64_t rows, heads;             // of the batch; KV heads
  int64_t each, newest;            // queries per KV head; of them, newest tokens per query head
  int64_t kind;                    // of queries and output
  int64_t pages;                   // address, int64 [rows]: the row of the parts; 0: the same
  int64_t sinks, slopes;           // float32 [query heads]; 0: none
  int64_t last;                    // float32 [rows], the newest position, for slopes
  int64_t totals;                  // float32 [rows, heads, each], or 0
  int64_t padded, threads;
};
enum { FLOAT32 = 32, BFLOAT16 = 17, FLOAT16 = 16 };

#define KV_EXPORT extern "C" __attribute__((visibility("default")))

typedef void (*Job)(void*);
typedef void (*Parallel)(Job, void*, unsigned, unsigned);
typedef int (*Run)(const Call*, const void*, void*, const float*, double, double, Parallel);

#ifdef KV_ISA
#define KV_JOIN2(a, b) a##b
#define KV_JOIN(a, b) KV_JOIN2(a, b)

namespace {

#if defined(__AVX512F__)
constexpr int W = 16, HELD = 16;  // lanes of a vector; vectors that are summed in registers
#elif defined(__AVX2__)
constexpr int W = 8, HELD = 8;
#else
constexpr int W = 4, HELD = 8;
#endif
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int TOGETHER = 8;  // queries whose sums, two vectors each, are in registers
#else
constexpr int TOGETHER = 4;
#endif
constexpr int SLOTS = 32;   // of a tile
constexpr int BLOCK = 128;  // slots whose weights are computed together
constexpr int MANY = 16;    // queries for which keys are turned, so that no vector is summed across
constexpr int HEARD = 1 << 19;  // scores that ``receive`` keeps, or those of MANY queries
constexpr int MOST = 256;  // channels
constexpr float NOTHING = -1e30f;
constexpr float UNSEEN = -1e38f;  // instead of -infinity, where a difference is wanted

typedef float vf __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(4 * W), aligned(4), may_alias));

inline vf all(float x) { return x - vf{}; }
inline vf load(const float* p) { return *(const vf*)p; }
inline void store(float* p, vf x) { *(vf*)p = x; }

inline float of_bfloat16(uint16_t x) {
  uint32_t bits = (uint32_t)x << 16;
  float out;
  memcpy(&out, &bits, 4);
  return out;
}

inline float from_half(uint16_t x) {
#if defined(__F16C__)
  return _cvtsh_ss(x);
#elif defined(__aarch64__)
  __fp16 out;
  memcpy(&out, &x, 2);
  return out;
#else
  uint32_t sign = (uint32_t)(x & 0x8000) << 16, exponent = (x >> 10) & 31, rest = x & 1023, bits;
  if (exponent == 31) {
    bits = sign | 0x7f800000 | rest << 13;
  } else if (exponent) {
    bits = sign | (exponent + 112) << 23 | rest << 13;
  } else {
    float out = (float)rest * (1.0f / 16777216.0f);
    return sign ? -out : out;
  }
  float out;
  memcpy(&out, &bits, 4);
  return out;
#endif
}

inline uint16_t to_bfloat16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if (x != x) return (uint16_t)((bits >> 16) | 64);
  return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline uint16_t to_float16(float x) {
#if defined(__F16C__)
  return _cvtss_sh(x, 0);
#elif defined(__aarch64__)
  __fp16 half = (__fp16)x;
  uint16_t out;
  memcpy(&out, &half, 2);
  return out;
#else
  uint32_t bits;
  memcpy(&bits, &x, 4);
  uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
  float size = std::fabs(x);
  if (x != x) return (uint16_t)(sign | 0x7e00);
  if (size >= 65520.0f) return (uint16_t)(sign | 0x7c00);
  if (size < 6.103515625e-05f)
    return (uint16_t)(sign | (uint16_t)std::nearbyint(size * 16777216.0f));
  memcpy(&bits, &size, 4);
  bits += 0xfff + ((bits >> 13) & 1);
  return (uint16_t)(sign | (uint16_t)((bits >> 13) - (112 << 10)));
#endif
}

template <int V>
struct Vectors;
#define KV_VECTORS(V)                                                                  \
  template <>                                                                          \
  struct Vectors<V> {                                                                  \
    typedef float f __attribute__((vector_size(4 * V), aligned(4), may_alias));        \
    typedef int32_t i __attribute__((vector_size(4 * V), aligned(4), may_alias));      \
    typedef uint8_t u8 __attribute__((vector_size(V), aligned(1), may_alias));         \
    typedef uint16_t u16 __attribute__((vector_size(2 * V), aligned(1), may_alias));   \
  };
KV_VECTORS(16)
KV_VECTORS(8)
KV_VECTORS(4)

// The next V channels as floats.
template <int V>
struct Lanes : Vectors<V> {
  typedef typename Vectors<V>::f f;
  typedef typename Vectors<V>::i i;
  typedef typename Vectors<V>::u8 u8;
  typedef typename Vectors<V>::u16 u16;

  static inline i bytes(const uint8_t* p) {
#if defined(__AVX512F__)
    if constexpr (V == 16) return (i)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
#endif
#if defined(__AVX2__)
    if constexpr (V == 8) return (i)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
#endif
    return __builtin_convertvector(*(const u8*)p, i);
  }
  static inline f floats(i x) { return __builtin_convertvector(x, f); }
  static inline f of_bfloat16(const uint16_t* p) {
#if defined(__AVX512F__)
    if constexpr (V == 16)
      return (f)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#endif
#if defined(__AVX2__)
    if constexpr (V == 8)
      return (f)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
#endif
    i wide = __builtin_convertvector(*(const u16*)p, i);
    return (f)(wide << 16);
  }
  static inline f of_float16(const uint16_t* p) {
#if defined(__AVX512F__)
    if constexpr (V == 16) return (f)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#endif
#if defined(__F16C__)
    if constexpr (V == 8) return (f)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#endif
    f out;
    for (int k = 0; k < V; k++) out[k] = from_half(p[k]);
    return out;
  }
};

#if defined(__AVX2__)
#define KV_IN_PLACE 1
// Slots in few bits that are read as they are: every number is used as soon as it is a float, which
// saves a store where several queries use it.
template <int BITS>
struct Codes {
  const uint8_t* codes;
  int64_t slot;
  const uint16_t* step;
  int groups, width, bytes;

  Codes(const Side& side, int64_t row, int64_t first)
      : codes((const uint8_t*)side.data + row * side.row + first * side.slot),
        slot(side.slot),
        step((const uint16_t*)side.step + row * side.small_row + first * side.groups),
        groups((int)side.groups),
        width((int)side.width),
        bytes((int)(side.groups * side.width / 2)) {}

  static bool fit(const Side& side) {
    const int64_t bytes = side.groups * side.width / 2;
    if (BITS == 8 && W != 16) return false;  // a tile is as fast
    return side.kind == BITS && side.width % W == 0 && (BITS == 8 || bytes % W == 0);
  }

  // A slot's numbers of one group, those in the lower (SHIFT 0) or upper halves of bytes.
  template <int SHIFT>
  struct Row {
    const uint8_t* at;
#if defined(__AVX512F__)
    __m512 table, scale;  // with 4 bits all sixteen numbers; with 8 bits the lowest

    inline vf operator[](int channel) const {
      __m512i index = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(at + channel)));
      if (BITS == 8) return (vf)_mm512_fmadd_ps(_mm512_cvtepi32_ps(index), scale, table);
      if (SHIFT) index = _mm512_srli_epi32(index, 4);
      return (vf)_mm512_permutexvar_ps(index, table);
    }
#else
    vf lowest, scale;

    inline vf operator[](int channel) const {
      vi code = Lanes<W>::bytes(at + channel);
      if (BITS == 4) code = SHIFT ? code >> 4 : code & 15;
      return Lanes<W>::floats(code) * scale + lowest;
    }
#endif
  };
  template <int SHIFT>
  inline Row<SHIFT> row(int i, int group) const {
    const float number = from_half(step[i * groups + group]);
    const uint8_t* at = codes + i * slot - (SHIFT ? bytes : 0);
#if defined(__AVX512F__)
    const __m512 scale = _mm512_set1_ps(number);
    if (BITS == 8) return {at, _mm512_mul_ps(scale, _mm512_set1_ps(-128)), scale};
    // Sixteen numbers are all there are: look them up.
    const __m512 numbers = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
    return {at, _mm512_mul_ps(numbers, scale), scale};
#else
    return {at, all(number * (BITS == 8 ? -128 : -8)), all(number)};
#endif
  }

  // Calls ``run`` with each group's first channel and end in the lower and in the upper halves.
  template <typename F>
  inline void for_each_piece(F run) const {
    for (int group = 0; group < groups; group++) {
      const int first = group * width, end = first + width;
      const int middle = BITS == 8 ? end : std::min(std::max(bytes, first), end);
      if (first < middle) run(std::integral_constant<int, 0>{}, group, first, middle);
      if (middle < end) run(std::integral_constant<int, 4>{}, group, middle, end);
    }
  }
};
#endif

// ``n`` slots in few bits, without unit and offset. The channels of a vector share a scale, and with
// 4 bits all are in the same half of their bytes.
template <int V, int BITS>
inline void of_codes(const uint8_t* codes, int64_t slot, const uint16_t* step, int groups,
                     int width, int n, int pad, float* out) {
  typedef Lanes<V> L;
  const int bytes = groups * width / 2;
  for (int i = 0; i < n; i++, codes += slot, out += pad)
    for (int group = 0; group < groups; group++, step++) {
      const float scale = from_half(*step), base = scale * (BITS == 8 ? -128 : -8);
      float* at = out + group * width;
      if (BITS == 8) {
        for (int c = 0; c < width; c += V)
          *(typename L::f*)(at + c) = L::floats(L::bytes(codes + group * width + c)) * scale + base;
        continue;
      }
      for (int c = 0; c < width; c += V) {
        const int channel = group * width + c;
        typename L::i x;
        if (channel < bytes) x = L::bytes(codes + channel) & 15;
        else x = L::bytes(codes + channel - bytes) >> 4;
        *(typename L::f*)(at + c) = L::floats(x) * scale + base;
      }
    }
}

inline void of_codes_one_by_one(const Side& side, const uint8_t* codes, const uint16_t* step,
                                float* __restrict out) {
  const int width = (int)side.width, channels = (int)side.groups * width, middle = channels / 2;
  if (side.kind == 8) {
    for (int c = 0; c < channels; c++) out[c] = (float)((int)codes[c] - 128);
  } else {
    for (int c = 0; c < middle; c++) out[c] = (float)((int)(codes[c] & 15) - 8);
    for (int c = 0; c < middle; c++) out[middle + c] = (float)((int)(codes[c] >> 4) - 8);
  }
  for (int from = 0; from < channels; from += width) {
    const float scale = from_half(step[from / width]);
    for (int c = from; c < from + width; c++) out[c] *= scale;
  }
}

template <int V>
inline void of_exact(const Side& side, const uint8_t* row, float* out) {
  const int dim = (int)side.dim;
  int c = 0;
  if (side.kind == BFLOAT16) {
    for (; c + V <= dim; c += V)
      *(typename Lanes<V>::f*)(out + c) = Lanes<V>::of_bfloat16((const uint16_t*)row + c);
    for (; c < dim; c++) out[c] = of_bfloat16(((const uint16_t*)row)[c]);
  } else {
    for (; c + V <= dim; c += V)
      *(typename Lanes<V>::f*)(out + c) = Lanes<V>::of_float16((const uint16_t*)row + c);
    for (; c < dim; c++) out[c] = from_half(((const uint16_t*)row)[c]);
  }
}

// The floats of ``n`` slots from ``first`` on, ``pad`` for each, in ``tile`` or where they are. The
// channels from ``dim`` to ``pad`` are 0. In a tile, SLOTS rows may be read.
const float* floats_of(const Side& side, int64_t row, int64_t first, int n, int pad, float* tile) {
  const uint8_t* data = (const uint8_t*)side.data + row * side.row + first * side.slot;
  const int dim = (int)side.dim;
  if (side.kind == FLOAT32) {
    if (dim == pad && n == SLOTS && side.slot == 4 * dim) return (const float*)data;
    for (int i = 0; i < n; i++) {
      memcpy(tile + i * pad, data + i * side.slot, 4 * dim);
      for (int c = dim; c < pad; c++) tile[i * pad + c] = 0;
    }
    return tile;
  }
  if (side.kind == BFLOAT16 || side.kind == FLOAT16) {
    for (int i = 0; i < n; i++) {
      of_exact<W>(side, data + i * side.slot, tile + i * pad);
      for (int c = dim; c < pad; c++) tile[i * pad + c] = 0;
    }
    return tile;
  }
  const int groups = (int)side.groups, width = (int)side.width, channels = groups * width;
  const int bytes = channels / 2;
  const uint16_t* step = (const uint16_t*)side.step + row * side.small_row + first * groups;
  const int64_t slot = side.slot;
#if defined(KV_IN_PLACE)
  if (Codes<4>::fit(side)) {
    const Codes<4> four(side, row, first);
    for (int i = 0; i < n; i++)
      four.for_each_piece([&](auto shift, int group, int from, int to) {
        const auto numbers = four.template row<decltype(shift)::value>(i, group);
        for (int c = from; c < to; c += W) store(tile + i * pad + c, numbers[c]);
      });
  } else
#endif
  {
  auto fits = [&](int v) { return width % v == 0 && (side.kind == 8 || bytes % v == 0); };
#define KV_OF_CODES(V)                                                                     \
  if (V <= W && fits(V)) {                                                                 \
    if (side.kind == 8) of_codes<V, 8>(data, slot, step, groups, width, n, pad, tile);  \
    else of_codes<V, 4>(data, slot, step, groups, width, n, pad, tile);                 \
  } else
  KV_OF_CODES(16) KV_OF_CODES(8) KV_OF_CODES(4)
  for (int i = 0; i < n; i++)
    of_codes_one_by_one(side, data + i * slot, step + i * groups, tile + i * pad);
#undef KV_OF_CODES
  }
  if (pad > dim)  // padding repeats the last channel
    for (int i = 0; i < n; i++)
      for (int c = dim; c < pad; c++) tile[i * pad + c] = 0;
  return tile;
}

// From W vectors, the vector of their sums.
template <int S, int... L>
inline vf merged(vf x, vf y, std::integer_sequence<int, L...>) {
  return __builtin_shufflevector(x, y, ((L & S) ? W + L : L)...) +
         __builtin_shufflevector(x, y, ((L & S) ? W + (L ^ S) : (L ^ S))...);
}
template <int S>
inline vf summed(const vf* x) {
  typedef std::make_integer_sequence<int, W> Every;
  if constexpr (S == 1) return merged<1>(x[0], x[1], Every{});
  else return merged<S>(summed<S / 2>(x), summed<S / 2>(x + S), Every{});
}

// Turns W vectors: lane i of vector k becomes lane k of vector i.
template <int S, int... L>
inline void turned_pair(vf& x, vf& y, std::integer_sequence<int, L...>) {
  const vf low = __builtin_shufflevector(x, y, ((L & S) ? W + (L ^ S) : L)...);
  y = __builtin_shufflevector(x, y, ((L & S) ? W + L : (L ^ S))...);
  x = low;
}
template <int S = W / 2>
inline void turn(vf* x) {
#pragma GCC unroll 16
  for (int i = 0; i < W; i++)
    if (!(i & S)) turned_pair<S>(x[i], x[i + S], std::make_integer_sequence<int, W>{});
  if constexpr (S > 1) turn<S / 2>(x);
}

// SLOTS rows of a tile, channel by channel.
inline void turn_tile(const float* rows, int pad, float* out, int wide) {
  for (int c = 0; c < pad; c += W)
    for (int i = 0; i < SLOTS; i += W) {
      vf x[W];
#pragma GCC unroll 16
      for (int k = 0; k < W; k++) x[k] = load(rows + (size_t)(i + k) * pad + c);
      turn(x);
#pragma GCC unroll 16
      for (int k = 0; k < W; k++) store(out + (size_t)(c + k) * wide + i, x[k]);
    }
}

// A slot that is floats already.
struct Floats {
  const float* at;
  inline vf operator[](int channel) const { return load(at + channel); }
};

// Adds the products of R queries and S slots, over some channels, to sums[query * S + slot].
template <int R, int S, typename Row>
inline void multiplied(const float* queries, const Row* rows, int pad, int from, int to, vf* sums) {
  for (int c = from; c < to; c += W) {
#pragma GCC unroll 16
    for (int i = 0; i < S; i++) {
      const vf x = rows[i][c];
#pragma GCC unroll 4
      for (int j = 0; j < R; j++) sums[j * S + i] += load(queries + j * pad + c) * x;
    }
  }
}

// Completes W such sums together.
template <int R, int S>
inline void completed(const vf* sums, float* scores) {
  const vf done = summed<W / 2>(sums);
  for (int j = 0; j < R; j++) memcpy(scores + j * BLOCK, (const float*)&done + j * S, 4 * S);
}

// Scores of R queries and ``n`` slots of a tile.
template <int R>
inline void scored(const float* queries, const float* tile, int pad, int n, float* scores) {
  constexpr int S = R == 3 ? W / 4 : W / R;
  for (int first = 0; first < n; first += S) {
    vf sums[W] = {};
    Floats rows[S];
    for (int i = 0; i < S; i++) rows[i] = {tile + (first + i) * pad};
    multiplied<R, S>(queries, rows, pad, 0, pad, sums);
    completed<R, S>(sums, scores + first);
  }
}

// Scores of R queries and V * W keys, which ``keys`` has channel by channel, with ``extra`` for each.
template <int R, int V>
inline void scores_of(const float* queries, const float* keys, const float* extra, int dim,
                      int wide, float* out, int64_t across) {
  vf sums[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) sums[r][v] = load(extra + v * W);
  for (int c = 0; c < dim; c++) {
    vf y[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) y[v] = load(keys + (size_t)c * wide + v * W);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const vf x = all(queries[(size_t)r * dim + c]);
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) sums[r][v] += x * y[v];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) store(out + r * across + v * W, sums[r][v]);
}

// Adds C vectors of the values of ``n`` slots, times the weights of R queries, to the outputs.
template <int R, int C, typename RowOf>
inline void added_columns(const float* weights, RowOf row_of, int pad, int n, int at, float* out) {
  vf sums[R][C];
#pragma GCC unroll 4
  for (int j = 0; j < R; j++)
#pragma GCC unroll 16
    for (int c = 0; c < C; c++) sums[j][c] = load(out + j * pad + at + c * W);
  for (int i = 0; i < n; i++) {
    const auto row = row_of(i);
    vf x[C];
#pragma GCC unroll 16
    for (int c = 0; c < C; c++) x[c] = row[at + c * W];
#pragma GCC unroll 4
    for (int j = 0; j < R; j++) {
      const vf w = all(weights[j * BLOCK + i]);
#pragma GCC unroll 16
      for (int c = 0; c < C; c++) sums[j][c] += w * x[c];
    }
  }
#pragma GCC unroll 4
  for (int j = 0; j < R; j++)
#pragma GCC unroll 16
    for (int c = 0; c < C; c++) store(out + j * pad + at + c * W, sums[j][c]);
}

// The same for the channels from ``at`` to ``to``.
template <int R, int C = R == 3 ? HELD / 4 : HELD / R, typename RowOf>
inline void added(const float* weights, RowOf row_of, int pad, int n, int at, int to, float* out) {
  for (; at + C * W <= to; at += C * W) added_columns<R, C>(weights, row_of, pad, n, at, out);
  if constexpr (C > 1)
    if (at < to) added<R, C / 2>(weights, row_of, pad, n, at, to, out);
}

// The same two over slots in few bits (Codes) as they are.
template <int R, typename Here>
inline void scored_in_place(const float* queries, const Here& codes, int pad, int n,
                            float* scores) {
  constexpr int S = W == 16 || R < 3 ? 4 : 2;  // R * S sums are at most W
  for (int first = 0; first < n; first += S) {
    vf sums[W] = {};
    codes.for_each_piece([&](auto shift, int group, int from, int to) {
      constexpr int SHIFT = decltype(shift)::value;
      typename Here::template Row<SHIFT> rows[S];
      for (int i = 0; i < S; i++)
        rows[i] = codes.template row<SHIFT>(std::min(first + i, n - 1), group);
      multiplied<R, S>(queries, rows, pad, from, to, sums);
    });
    completed<R, S>(sums, scores + first);
  }
}

template <int R, typename Here>
inline void added_in_place(const float* weights, const Here& codes, int pad, int n, float* out) {
  codes.for_each_piece([&](auto shift, int group, int at, int to) {
    constexpr int SHIFT = decltype(shift)::value;
    auto row_of = [&](int i) { return codes.template row<SHIFT>(i, group); };
    added<R, W == 16 ? 4 : HELD / 4>(weights, row_of, pad, n, at, to, out);
  });
}

// exp(x) for x <= 0, to 1 unit in the last place or so; 0 below -87.
inline vf exped(vf x) {
  const vf low = all(-87.0f);
  const vi dead = x < low;
  x = dead ? low : x;
  vf n = x * 1.44269504088896341f;
  const vf magic = all(12582912.0f);  // adding it rounds to an integer
  n = (n + magic) - magic;
  const vf r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  vf p = all(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const vi bits = (__builtin_convertvector(n, vi) + 127) << 23;
  p *= (vf)bits;
  return dead ? vf{} : p;
}

// Over some slots of a KV head: the weighted values of each query, the sum of its weights, and the
// score that was taken as 0.
struct State {
  float *out, *total, *most;
};

struct Turn {
  const Call* call;
  const Part* const* parts;
  const uint8_t* queries;
  uint8_t* out;
  double scaling, softcap;
  int each, pad, value_pad;
  int64_t chunk;                          // slots of a task, or more than all
  const int64_t* tasks;                   // first task of every row and head
  float* states;
  int64_t state;                          // floats of a state
  const float* weights;                   // of the queries, to add attention to scores; else null
  std::atomic<int64_t> next;
  int64_t all;
};

// Memory that begins with a line of the cache: numbers that lie across two take twice as long.
template <typename T>
struct Lines {
  using value_type = T;
  Lines() = default;
  template <typename U>
  Lines(const Lines<U>&) {}
  T* allocate(size_t n) { return (T*)::operator new(n * sizeof(T), std::align_val_t(64)); }
  void deallocate(T* p, size_t) { ::operator delete(p, std::align_val_t(64)); }
  bool operator==(const Lines&) const { return true; }
  bool operator!=(const Lines&) const { return false; }
};
using Room = std::vector<float, Lines<float>>;

// Working memory of a thread.
struct Memory {
  Room working, results, sums;
  std::vector<int64_t> numbers;

  static float* atleast(Room& room, size_t floats) {
    if (room.size() < floats) room.resize(floats);
    return room.data();
  }
};
thread_local Memory memory;

inline int64_t page_of(const Call& call, int64_t row) {
  return call.pages ? ((const int64_t*)call.pages)[row] : row;
}
inline int64_t size_of(const Part& part, int64_t row, int64_t head) {
  if (!part.sizes) return part.base + part.appended;
  return ((const int64_t*)part.sizes)[row * part.sizes_row + head * part.sizes_head] +
         part.appended;
}
// The query head of the query ``j`` of a KV head.
inline int64_t asks_of(const Call& call, int64_t head, int j) {
  return head * (call.each / call.newest) + j / call.newest;
}
inline int64_t start_of(const Part& part, int64_t row, int64_t head) {
  if (!part.start) return head * part.capacity;
  return ((const int64_t*)part.start)[row * part.start_row + head];
}

// Four queries at a time, which share what is read, then the rest.
template <typename F>
inline void for_each_query(int each, F run) {
  int j = 0;
  for (; j + 4 <= each; j += 4) run(std::integral_constant<int, 4>{}, j);
  if (each - j == 3) run(std::integral_constant<int, 3>{}, j);
  if (each - j == 2) run(std::integral_constant<int, 2>{}, j);
  if (each - j == 1) run(std::integral_constant<int, 1>{}, j);
}

// Calls ``run`` with the slots of a side from ``first`` on, if they are read as they are: the
// numbers are then used by at least three queries.
template <typename F>
inline bool in_place(const Side& side, int64_t row, int64_t first, int each, F run) {
#if defined(KV_IN_PLACE)
  if (each >= 3 && Codes<4>::fit(side)) return run(Codes<4>(side, row, first)), true;
  if (each >= 3 && Codes<8>::fit(side)) return run(Codes<8>(side, row, first)), true;
#endif
  (void)side, (void)row, (void)first, (void)each, (void)run;
  return false;
}

// Scores of all queries and the BLOCK keys that ``turned`` has channel by channel.
inline void scored_turned(const float* queries, const float* turned, int pad, int each, int n,
                          float* scores) {
  static const float zeros[BLOCK] = {};
  for (int i = 0; i < n; i += 2 * W) {
    int r = 0;
    for (; r + TOGETHER <= each; r += TOGETHER)
      scores_of<TOGETHER, 2>(queries + (size_t)r * pad, turned + i, zeros, pad, BLOCK,
                      scores + (size_t)r * BLOCK + i, BLOCK);
    for (; r + 4 <= each; r += 4)
      scores_of<4, 2>(queries + (size_t)r * pad, turned + i, zeros, pad, BLOCK,
                      scores + (size_t)r * BLOCK + i, BLOCK);
    for (; r < each; r++)
      scores_of<1, 2>(queries + (size_t)r * pad, turned + i, zeros, pad, BLOCK,
                      scores + (size_t)r * BLOCK + i, BLOCK);
  }
}

// Queries of a KV head, ``each`` from number ``first`` on, as floats times the scaling, and room for
// scores.
struct Asking {
  const Turn& turn;
  const int64_t row, head, page;
  const int first, each;
  float *tile, *queries, *in_units, *scores, *constant, *turned;

  Asking(const Turn& turn, int64_t row, int64_t head, int first, int each)
      : turn(turn), row(row), head(head), page(page_of(*turn.call, row)), first(first), each(each) {
    const Call& call = *turn.call;
    const int pad = turn.pad, dim = (int)turn.parts[0]->keys.dim;
    const size_t rows_of_tile = (size_t)SLOTS * std::max(pad, turn.value_pad);
    const size_t block = each < MANY ? 0 : (size_t)BLOCK * pad;
    const size_t need = (size_t)each * (2 * pad + BLOCK + 1) + rows_of_tile + block;
    tile = Memory::atleast(memory.working, need);
    turned = tile + rows_of_tile;
    queries = turned + block;
    in_units = queries + (size_t)each * pad;
    scores = in_units + (size_t)each * pad;
    constant = scores + (size_t)each * BLOCK;
    const float scaling = (float)turn.scaling;
    for (int j = 0; j < each; j++) {
      const int64_t at = ((row * call.heads + head) * turn.each + first + j) * dim;
      float* q = queries + (size_t)j * pad;
      for (int c = 0; c < dim; c++) {
        float x;
        if (call.kind == FLOAT32) x = ((const float*)turn.queries)[at + c];
        else if (call.kind == BFLOAT16) x = of_bfloat16(((const uint16_t*)turn.queries)[at + c]);
        else x = from_half(((const uint16_t*)turn.queries)[at + c]);
        q[c] = x * scaling;
      }
      for (int c = dim; c < pad; c++) q[c] = 0;
    }
  }

  // Queries and constants of scores for the units of a part's keys; what its keys are multiplied by.
  const float* for_part(const Part& part) const {
    const int pad = turn.pad, dim = (int)part.keys.dim;
    for (int j = 0; j < each; j++) constant[j] = 0;
    if (!part.keys.unit) return queries;
    const float* unit =
        (const float*)part.keys.unit + page * part.keys.unit_row + head * part.keys.unit_head;
    const float* offset =
        (const float*)part.keys.offset + page * part.keys.offset_row + head * part.keys.offset_head;
    for (int j = 0; j < each; j++) {
      double sum = 0;
      for (int c = 0; c < dim; c++) {
        in_units[(size_t)j * pad + c] = queries[(size_t)j * pad + c] * unit[c];
        sum += (double)queries[(size_t)j * pad + c] * offset[c];
      }
      for (int c = dim; c < pad; c++) in_units[(size_t)j * pad + c] = 0;
      constant[j] = (float)sum;
    }
    return in_units;
  }

  // Scores of all queries and the ``n`` slots from ``at`` on, of a head of ``size`` slots; -infinity
  // for slots that a query does not see, and up to the end of a vector.
  void score(const Part& part, const float* asked, bool final, int64_t size, int64_t at, int n) {
    const Call& call = *turn.call;
    const int pad = turn.pad, full = (n + W - 1) / W * W;
    const int64_t start = start_of(part, row, head);
    const float cap = (float)turn.softcap;
    const bool many = each >= MANY;
    const bool done = !many && in_place(part.keys, page, start + at, each, [&](const auto& codes) {
      for_each_query(each, [&](auto count, int j) {
        scored_in_place<decltype(count)::value>(asked + (size_t)j * pad, codes, pad, n,
                                                scores + (size_t)j * BLOCK);
      });
    });
    for (int next = 0; next < n && !done; next += SLOTS) {
      const int some = std::min(SLOTS, n - next);
      const float* rows = floats_of(part.keys, page, start + at + next, some, pad, tile);
      if (many) {
        turn_tile(rows, pad, turned + next, BLOCK);
        continue;
      }
      for_each_query(each, [&](auto count, int j) {
        scored<count.value>(asked + (size_t)j * pad, rows, pad, some,
                            scores + (size_t)j * BLOCK + next);
      });
    }
    if (many) scored_turned(asked, turned, pad, each, n, scores);
    const float* mass =
        part.mass ? (const float*)part.mass + page * part.mass_row + start + at : nullptr;
    const float* position =
        call.slopes ? (const float*)part.positions + page * part.position_row + start + at : nullptr;
    for (int j = 0; j < each; j++) {
      float* s = scores + (size_t)j * BLOCK;
      if (constant[j] != 0)
        for (int i = 0; i < n; i++) s[i] += constant[j];
      if (cap > 0)
        for (int i = 0; i < n; i++) s[i] = cap * std::tanh(s[i] / cap);
      if (mass)
        for (int i = 0; i < n; i++) s[i] += mass[i];
      if (position) {
        const float slope = ((const float*)call.slopes)[asks_of(call, head, first + j)];
        const float last = ((const float*)call.last)[row];
        for (int i = 0; i < n; i++) s[i] += slope * (position[i] - last);
      }
      int seen = n;  // the newest tokens do not look ahead
      if (final && call.newest > 1) {
        const int64_t limit = size - call.newest + (first + j) % call.newest + 1 - at;
        seen = (int)std::max<int64_t>(0, std::min<int64_t>(n, limit));
      }
      for (int i = seen; i < full; i++) s[i] = -std::numeric_limits<float>::infinity();
    }
  }

};

inline int64_t padded_to(int64_t count) { return (count + W - 1) / W * W; }

// Every lane next to the one that is S further on or back.
template <int S, int... L>
inline vf crossed(vf x, std::integer_sequence<int, L...>) {
  return __builtin_shufflevector(x, x, (L ^ S)...);
}
template <int S = W / 2>
inline float sum_of(vf x) {
  x += crossed<S>(x, std::make_integer_sequence<int, W>{});
  if constexpr (S == 1) return x[0];
  else return sum_of<S / 2>(x);
}
template <int S = W / 2>
inline float greatest_lane(vf x) {
  const vf y = crossed<S>(x, std::make_integer_sequence<int, W>{});
  x = y > x ? y : x;
  if constexpr (S == 1) return x[0];
  else return greatest_lane<S / 2>(x);
}
inline float greatest_of(const float* s, int64_t full) {
  vf greatest = load(s);
  for (int64_t i = W; i < full; i += W) {
    const vf x = load(s + i);
    greatest = x > greatest ? x : greatest;
  }
  return greatest_lane(greatest);
}

// Attention of all queries of a KV head over the slots ``from`` to ``to`` of all parts together.
void attend_some(Asking& asking, int64_t from, int64_t to, State state) {
  const Turn& turn = asking.turn;
  const Call& call = *turn.call;
  const int each = asking.each, wide = turn.value_pad;
  for (int j = 0; j < each; j++) {
    std::fill_n(state.out + (size_t)j * wide, wide, 0.0f);
    state.total[j] = 0;
    state.most[j] = -std::numeric_limits<float>::infinity();
  }
  int64_t before = 0;
  for (int64_t number = 0; number < call.count; number++) {
    const Part& part = *turn.parts[number];
    const int64_t size = size_of(part, asking.row, asking.head);
    const int64_t start = start_of(part, asking.row, asking.head);
    const int64_t begin = std::max<int64_t>(from - before, 0);
    const int64_t end = std::min<int64_t>(to - before, size);
    before += size;
    if (begin >= end) continue;
    const float* asked = asking.for_part(part);
    const float value_unit =
        part.values.unit
            ? ((const float*)part.values.unit)[asking.page * part.values.unit_row +
                                               asking.head * part.values.unit_head]
            : 1.0f;
    for (int64_t at = begin; at < end; at += BLOCK) {
      const int n = (int)std::min<int64_t>(BLOCK, end - at), full = (n + W - 1) / W * W;
      asking.score(part, asked, number == call.count - 1, size, at, n);
      for (int j = 0; j < each; j++) {
        float* s = asking.scores + (size_t)j * BLOCK;
        const float greatest = greatest_of(s, full);
        const float most = std::max(state.most[j], greatest);
        // Nothing is seen yet. A score that is no number goes on, and makes the total none.
        if (most == -std::numeric_limits<float>::infinity() && greatest == most) {
          std::fill_n(s, full, 0.0f);
          continue;
        }
        if (most > state.most[j]) {
          const float less = state.total[j] > 0 ? std::exp(state.most[j] - most) : 0.0f;
          if (state.total[j] > 0)
            for (int c = 0; c < wide; c += W) {
              float* out = state.out + (size_t)j * wide + c;
              store(out, load(out) * less);
            }
          state.total[j] *= less;
          state.most[j] = most;
        }
        vf sum = vf{};
        for (int i = 0; i < full; i += W) {
          const vf weight = exped(load(s + i) - most);
          sum += weight;
          store(s + i, weight * value_unit);
        }
        state.total[j] += sum_of(sum);
      }
      const bool done =
          in_place(part.values, asking.page, start + at, each, [&](const auto& codes) {
            for_each_query(each, [&](auto count, int j) {
              added_in_place<decltype(count)::value>(asking.scores + (size_t)j * BLOCK, codes, wide,
                                                     n, state.out + (size_t)j * wide);
            });
          });
      for (int first = 0; first < n && !done; first += SLOTS) {
        const int some = std::min(SLOTS, n - first);
        const float* rows =
            floats_of(part.values, asking.page, start + at + first, some, wide, asking.tile);
        for_each_query(each, [&](auto count, int j) {
          auto row_of = [&](int i) { return Floats{rows + i * wide}; };
          added<count.value>(asking.scores + (size_t)j * BLOCK + first, row_of, wide, some, 0, wide,
                             state.out + (size_t)j * wide);
        });
      }
    }
  }
}

// For every slot of a KV head: the larger of its score and the attention that it receives from all
// queries, each times its weight. The weights of some queries in all slots are kept, relative to the
// greatest of a block, since a share is relative to the sum over all slots.
void receive(const Turn& turn, int64_t row, int64_t head) {
  const Call& call = *turn.call;
  int64_t blocks = 0;
  for (int64_t number = 0; number < call.count; number++)
    blocks += (size_of(*turn.parts[number], row, head) + BLOCK - 1) / BLOCK;
  if (!blocks) return;
  const int64_t most_queries = std::max<int64_t>(MANY, HEARD / (blocks * BLOCK));
  const int64_t rounds = (turn.each + most_queries - 1) / most_queries;
  const int some = (int)((turn.each + rounds - 1) / rounds);  // as many queries in every round
  const int wide = (int)padded_to(some);
  const size_t need = (size_t)blocks * (BLOCK * (some + 1) + wide) + 3 * wide;
  float *sums = Memory::atleast(memory.sums, need), *kept = sums + blocks * BLOCK;
  float *greatest = kept + (size_t)blocks * BLOCK * some, *total = greatest + blocks * wide;
  float *most = total + wide, *of_block = most + wide;
  std::fill_n(sums, blocks * BLOCK, 0.0f);
  for (int first = 0; first < turn.each; first += some) {
    Asking asking(turn, row, head, first, std::min(some, turn.each - first));
    const int each = asking.each;
    std::fill_n(greatest, blocks * wide + 3 * wide, 0.0f);
    std::fill_n(most, wide, UNSEEN);
    int64_t block = 0;
    for (int64_t number = 0; number < call.count; number++) {
      const Part& part = *turn.parts[number];
      const int64_t size = size_of(part, row, head);
      const float* asked = asking.for_part(part);
      for (int64_t at = 0; at < size; at += BLOCK, block++) {
        const int n = (int)std::min<int64_t>(BLOCK, size - at), full = (int)padded_to(n);
        asking.score(part, asked, number == call.count - 1, size, at, n);
        float* own = greatest + block * wide;
        for (int j = 0; j < each; j++) {
          const float* s = asking.scores + (size_t)j * BLOCK;
          float* out = kept + ((size_t)block * some + j) * BLOCK;
          const float here = own[j] = std::max(greatest_of(s, full), UNSEEN);
          if (here == UNSEEN) {  // it is before all of them
            std::fill_n(out, full, 0.0f);
            of_block[j] = 0;
            continue;
          }
          vf sum = vf{};
          for (int i = 0; i < full; i += W) {
            const vf x = exped(load(s + i) - here);
            sum += x;
            store(out + i, x);
          }
          of_block[j] = sum_of(sum);
        }
        for (int j = 0; j < each; j += W) {
          const vf before = load(most + j), here = load(own + j), top = here > before ? here : before;
          store(total + j, load(total + j) * exped(before - top) + load(of_block + j) * exped(here - top));
          store(most + j, top);
        }
      }
    }
    for (int j = 0; j < each; j++) {
      if (call.sinks)
        total[j] += std::exp(((const float*)call.sinks)[asks_of(call, head, first + j)] - most[j]);
      total[j] = turn.weights[(first + j) % call.newest] / total[j];
    }
    for (block = 0; block < blocks; block++) {
      float* own = greatest + block * wide;
      for (int j = 0; j < each; j += W) {
        const vf here = load(own + j), share = load(total + j) * exped(here - load(most + j));
        store(own + j, here <= NOTHING / 2 ? vf{} : share);  // or it sees nothing
      }
      const float* x = kept + (size_t)block * some * BLOCK;
      for (int i = 0; i < BLOCK; i += W) {
        vf sum = load(sums + block * BLOCK + i);
        for (int j = 0; j < each; j++) sum += load(x + (size_t)j * BLOCK + i) * own[j];
        store(sums + block * BLOCK + i, sum);
      }
    }
  }
  for (int64_t number = 0; number < call.count; number++) {
    const Part& part = *turn.parts[number];
    const int64_t size = size_of(part, row, head);
    float* held = (float*)part.score + page_of(call, row) * part.score_row + start_of(part, row, head);
    for (int64_t i = 0; i < size; i++) held[i] = std::max(held[i], sums[i]);
    sums += (size + BLOCK - 1) / BLOCK * BLOCK;
  }
}

inline State state_at(const Turn& turn, int64_t task) {
  float* at = turn.states + task * turn.state;
  return {at, at + (size_t)turn.each * turn.value_pad,
          at + (size_t)turn.each * turn.value_pad + turn.each};
}

void work(void* given) {
  Turn& turn = *(Turn*)given;
  const Call& call = *turn.call;
  const int64_t owners = call.rows * call.heads;
  for (;;) {
    const int64_t task = turn.next.fetch_add(1);
    if (task >= turn.all) return;
    const int64_t owner =
        std::upper_bound(turn.tasks, turn.tasks + owners, task) - turn.tasks - 1;
    const int64_t from = (task - turn.tasks[owner]) * turn.chunk;
    const int64_t row = owner / call.heads, head = owner % call.heads;
    if (turn.weights) {
      receive(turn, row, head);
      continue;
    }
    Asking asking(turn, row, head, 0, turn.each);
    attend_some(asking, from, from + turn.chunk, state_at(turn, task));
  }
}

void finish(const Turn& turn, int64_t owner) {
  const Call& call = *turn.call;
  const int each = turn.each, wide = turn.value_pad, dim = (int)turn.parts[0]->values.dim;
  const int64_t first = turn.tasks[owner], end = turn.tasks[owner + 1], head = owner % call.heads;
  for (int j = 0; j < each; j++) {
    float most = -std::numeric_limits<float>::infinity(), total = 0;
    for (int64_t task = first; task < end; task++) most = std::max(most, state_at(turn, task).most[j]);
    State whole = state_at(turn, first);
    float* out = whole.out + (size_t)j * wide;
    for (int64_t task = first; task < end; task++) {
      State state = state_at(turn, task);
      const float weight = state.total[j] > 0 ? std::exp(state.most[j] - most) : 0.0f;
      total += weight * state.total[j];
      const float* other = state.out + (size_t)j * wide;
      if (task == first) {
        if (weight != 1.0f)
          for (int c = 0; c < dim; c++) out[c] = weight > 0 ? out[c] * weight : 0.0f;
      } else if (weight > 0) {
        for (int c = 0; c < dim; c++) out[c] += weight * other[c];
      }
    }
    float log_total = total != 0 ? most + std::log(total) : NOTHING;
    float share = total != 0 ? 1 / total : 0.0f;
    if (call.sinks) {
      const float sink = ((const float*)call.sinks)[asks_of(call, head, j)];
      share /= 1 + std::exp(sink - log_total);
    }
    if (call.padded && log_total <= NOTHING / 2) share = 0;
    const int64_t at = (owner * each + j) * dim;
    for (int c = 0; c < dim; c++) {
      const float x = share == 0 ? 0.0f : out[c] * share;
      if (call.kind == FLOAT32) ((float*)turn.out)[at + c] = x;
      else if (call.kind == BFLOAT16) ((uint16_t*)turn.out)[at + c] = to_bfloat16(x);
      else ((uint16_t*)turn.out)[at + c] = to_float16(x);
    }
    if (call.totals) ((float*)call.totals)[owner * each + j] = log_total;
  }
}

}  // namespace

extern "C" int KV_JOIN(kvsketch_run_, KV_ISA)(const Call* call, const void* queries, void* out,
                                              const float* weights, double scaling, double softcap,
                                               Parallel parallel) {
  const Part* const* parts = (const Part* const*)call->parts;
  int64_t dims[2] = {0, 0};
  for (int64_t number = 0; number < call->count; number++) {
    const Side* sides[2] = {&parts[number]->keys, &parts[number]->values};
    for (int k = 0; k < 2; k++) {
      const int64_t channels = sides[k]->groups * sides[k]->width;
      dims[k] = std::max(dims[k], std::max(sides[k]->dim, channels));
    }
  }
  if (dims[0] > MOST || dims[1] > MOST || !call->count || !call->newest) return 1;
  Turn turn;
  turn.call = call;
  turn.parts = parts;
  turn.queries = (const uint8_t*)queries;
  turn.out = (uint8_t*)out;
  turn.scaling = scaling;
  turn.softcap = softcap;
  turn.each = (int)call->each;
  turn.weights = weights;
  turn.pad = (int)padded_to(dims[0]);
  turn.value_pad = (int)padded_to(dims[1]);
  const int64_t owners = call->rows * call->heads;
  memory.numbers.resize(owners + 1);
  int64_t slots = 0;
  for (int64_t owner = 0; owner < owners; owner++) {
    const int64_t row = owner / call->heads, head = owner % call->heads;
    int64_t size = 0;
    for (int64_t number = 0; number < call->count; number++)
      size += size_of(*parts[number], row, head);
    memory.numbers[owner] = size;
    slots += size;
  }
  // A few tasks for every thread, so that none waits for another; one for a head if that is less.
  const bool many = parallel && call->threads > 1 && slots * (dims[0] + dims[1]) > (1 << 15);
  int64_t chunk = many ? slots / (4 * call->threads) : slots;
  chunk = std::max<int64_t>((chunk + SLOTS - 1) / SLOTS * SLOTS, 4 * SLOTS);
  int64_t tasks = 0;
  for (int64_t owner = 0; owner < owners; owner++) {
    const int64_t size = memory.numbers[owner];
    memory.numbers[owner] = tasks;
    tasks += weights ? 1 : std::max<int64_t>(1, (size + chunk - 1) / chunk);
  }
  memory.numbers[owners] = tasks;
  turn.state = padded_to((int64_t)turn.each * (turn.value_pad + 2));
  turn.chunk = chunk;
  turn.tasks = memory.numbers.data();
  turn.states = weights ? nullptr : Memory::atleast(memory.results, (size_t)(tasks * turn.state));
  turn.all = tasks;
  turn.next.store(0);
  if (many) parallel(work, &turn, (unsigned)call->threads, 0);
  else work(&turn);
  for (int64_t owner = 0; owner < owners && !weights; owner++) finish(turn, owner);
  return 0;
}

#include "pairs.h"
#include "groups.h"
#include "shares.h"
#include "exchange.h"
#endif  // KV_ISA

#ifdef KV_DISPATCH
#define KV_RUN(isa)                                                                            \
  extern "C" int kvsketch_run_##isa(const Call*, const void*, void*, const float*, double, double, \
                                    Parallel);                                         \
  extern "C" void kvsketch_group_##isa(void*, int64_t, Parallel);                               \
  extern "C" void kvsketch_share_##isa(void*, int64_t, Parallel);                              \
  extern "C" void kvsketch_exchange_##isa(void*, int64_t, Parallel);                           \
  static const Copy of_##isa = {kvsketch_run_##isa, kvsketch_group_##isa, kvsketch_share_##isa, \
                                kvsketch_exchange_##isa};
struct Copy {  // for one set of vector instructions
  Run run;
  void (*group)(void*, int64_t, Parallel);
  void (*share)(void*, int64_t, Parallel);
  void (*exchange)(void*, int64_t, Parallel);
};
#if defined(__x86_64__) && !defined(KV_NO_AMX)
KV_RUN(amx)
#elif defined(__x86_64__)
#define of_amx of_avx512
#endif
#if defined(__x86_64__)
KV_RUN(avx512)
KV_RUN(avx2)
#endif
KV_RUN(plain)

#if defined(__x86_64__)
// Whether the processor has a matrix unit for bfloat16, and Linux lets this process use it.
static bool has_tiles() {
#if defined(__linux__) && !defined(KV_NO_AMX)
  unsigned a, b, c, d;
  constexpr unsigned units = 1u << 22 | 1u << 24;  // AMX-BF16 and AMX-TILE
  constexpr long ask = 0x1023, state = 18;          // ARCH_REQ_XCOMP_PERM, the contents of tiles
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & units) != units) return false;
  return syscall(SYS_arch_prctl, ask, state) == 0;
#else
  return false;
#endif
}
#endif

static const Copy* best(int* which) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
    static const bool tiles = has_tiles();
    *which = tiles ? 3 : 2;
    return tiles ? &of_amx : &of_avx512;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    *which = 1;
    return &of_avx2;
  }
#endif
  *which = 0;
  return &of_plain;
}

static int level;
static const Copy* chosen = best(&level);
static Parallel parallel = nullptr;

// 3: AVX-512 and AMX, 2: AVX-512, 1: AVX2, 0: what every processor of the platform has.
KV_EXPORT int kvsketch_level() { return level; }
// The function that runs a job on several threads, that of torch's own OpenMP library.
KV_EXPORT void kvsketch_threads(void* function) { parallel = (Parallel)function; }
// Choose less than what the processor has (for tests); returns the level that is used now.
KV_EXPORT int kvsketch_limit(int most) {
  chosen = best(&level);
#if defined(__x86_64__)
  if (most < 3 && level == 3) chosen = &of_avx512, level = 2;
  if (most < 2 && level == 2) chosen = &of_avx2, level = 1;
#endif
  if (most < 1) chosen = &of_plain, level = 0;
  return level;
}
KV_EXPORT int kvsketch_attend(const Call* call, const void* queries, void* out, double scaling,
                               double softcap) {
  return chosen->run(call, queries, out, nullptr, scaling, softcap, parallel);
}
// Raises the scores of all slots to the attention that the slots receive from the queries, times
// their weights, float32 [newest], where it is larger.
KV_EXPORT int kvsketch_receive(const Call* call, const void* queries, const float* weights,
                               double scaling, double softcap) {
  return chosen->run(call, queries, nullptr, weights, scaling, softcap, parallel);
}
// See ``Grouping`` in groups.h.
KV_EXPORT void kvsketch_group(void* grouping, int64_t threads) {
  chosen->group(grouping, threads, parallel);
}
// See ``Shares`` in shares.h.
KV_EXPORT void kvsketch_share(void* shares, int64_t threads) {
  chosen->share(shares, threads, parallel);
}
// See ``Exchange`` in exchange.h.
KV_EXPORT void kvsketch_exchange(void* exchange, int64_t threads) {
  chosen->exchange(exchange, threads, parallel);
}
KV_EXPORT const char* kvsketch_mark() { return KV_MARK; }
KV_EXPORT int64_t kvsketch_layout() { return (int64_t)sizeof(Part) << 32 | (int64_t)sizeof(Call); }
#endif
