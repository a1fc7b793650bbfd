// The largest share of attention that any query gives a key, see kernels/shares.py. Part of
// attention.cpp.
//
// Scores of a block of queries over all keys are held at once, since a share is relative to the sum
// over all keys.

namespace {

struct Shares {
  const float *queries, *keys;  // [rows, count, dim] and [rows, size, dim]
  const float* log_mass;        // [rows, size]: added to the scores; null: 0
  float* most;                  // [rows, size]: the log of the largest share
  int64_t rows, count, size, dim;
  double scaling;               // of the products of queries and keys
  std::atomic<int64_t> next;
};

constexpr int ASKING = 32;  // queries of a block
constexpr int NEAR = 32;     // keys whose scores with all of them are computed together

constexpr double LOG2E = 1.44269504088896340736;

inline vf larger(vf x, vf y) {
#if defined(__AVX512F__)
  return (vf)_mm512_max_ps((__m512)x, (__m512)y);
#elif defined(__AVX2__)
  return (vf)_mm256_max_ps((__m256)x, (__m256)y);
#else
  return x > y ? x : y;
#endif
}

// 2^x for x <= 0, to a few units in the last place; nearly 0 below -126.
inline vf power(vf x) {
  x = larger(x, all(-126.0f));
  constexpr float whole = 3 << 22;  // beside it, floats are whole numbers
  const vf n = x + whole, r = x - (n - whole);
  vf p = all(1.33335581e-3f);
  p = p * r + 9.61812911e-3f;
  p = p * r + 5.55041087e-2f;
  p = p * r + 2.40226507e-1f;
  p = p * r + 6.93147181e-1f;
  return (vf)((vi)(p * r + 1.0f) + ((vi)n << 23));
}

inline float largest(vf x) {
  float found = x[0];
  for (int k = 1; k < W; k++) found = std::max(found, x[k]);
  return found;
}

inline bool any_above(vf x, float limit) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)x, (__m512)all(limit), _CMP_GT_OQ) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_ps(_mm256_cmp_ps((__m256)x, (__m256)all(limit), _CMP_GT_OQ)) != 0;
#else
  const vi above = x > limit;
  int32_t found = 0;
  for (int k = 0; k < W; k++) found |= above[k];
  return found != 0;
#endif
}

#if defined(__AMX_BF16__)

constexpr int SIDE = 16, DEPTH = 32;  // of a tile: its rows, and the channels of one of them
constexpr int TILE = SIDE * DEPTH;

// Both parts of a number, as bfloat16: their sum differs from it by 2^-17 of it at most.
struct Halves {
  uint16_t high, low;
  explicit Halves(float x) : high(to_bfloat16(x)), low(to_bfloat16(x - of_bfloat16(high))) {}
};

// Products of queries and keys by the matrix unit of the processor, which multiplies bfloat16 and
// adds in float32: numbers of a model in bfloat16 as they are, others as two numbers each, without
// the product of both lower parts.
class Products {
  const int64_t size, dim, chunks;
  uint16_t *high, *low, *asking, *asking_low;
  bool keys_low = false, queries_low = false;

 public:
  static size_t room(int64_t across, int64_t dim) {
    return (size_t)(across + ASKING) * ((dim + DEPTH - 1) / DEPTH * DEPTH);
  }

  // Keys are stored in tiles of 16 keys and 32 channels, in which two channels are neighbours.
  Products(const float* keys, int64_t size, int64_t across, int64_t dim, float* room)
      : size(size), dim(dim), chunks((dim + DEPTH - 1) / DEPTH) {
    high = (uint16_t*)room, low = high + across * chunks * DEPTH;
    asking = low + across * chunks * DEPTH, asking_low = asking + ASKING * chunks * DEPTH;
    memset(room, 0, sizeof(float) * Products::room(across, dim));
    for (int64_t i = 0; i < size; i++)
      for (int64_t c = 0; c < dim; c++) {
        const Halves x(keys[i * dim + c]);
        const int64_t tile = (i / SIDE * chunks + c / DEPTH) * TILE, pair = c % DEPTH / 2;
        const int64_t at = tile + (pair * SIDE + i % SIDE) * 2 + c % 2;
        high[at] = x.high, low[at] = x.low;
        keys_low |= x.low != 0;
      }
    struct alignas(64) {
      uint8_t palette = 1, start = 0, none[14] = {};
      uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {SIDE, SIDE, SIDE, SIDE, SIDE, SIDE, SIDE, SIDE};
    } shape;
    __asm__ volatile("" ::: "memory");  // some compilers do not know that this reads all of it
    _tile_loadconfig(&shape);
  }

  ~Products() { _tile_release(); }

  void ask(const float* queries, int count) {
    queries_low = false;
    memset(asking, 0, sizeof(uint16_t) * 2 * ASKING * chunks * DEPTH);
    for (int r = 0; r < count; r++)
      for (int64_t c = 0; c < dim; c++) {
        const Halves x(queries[r * dim + c]);
        const int64_t at = (r / SIDE * chunks + c / DEPTH) * TILE + r % SIDE * DEPTH + c % DEPTH;
        asking[at] = x.high, asking_low[at] = x.low;
        queries_low |= x.low != 0;
      }
  }

  // With the NEAR keys from ``at`` on, ``[ASKING, NEAR]``.
  void with(int64_t at, float* out) const {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    __asm__ volatile("" ::: "memory");  // nor what these read
    for (int64_t chunk = 0; chunk < chunks; chunk++) {
      take(high + at * chunks * DEPTH, chunk);
      add(asking, chunk);
      if (queries_low) add(asking_low, chunk);
      if (!keys_low) continue;
      take(low + at * chunks * DEPTH, chunk);
      add(asking, chunk);
    }
    constexpr int across = NEAR * sizeof(float);
    float* below = out + SIDE * NEAR;
    _tile_stored(0, out, across);
    _tile_stored(1, out + SIDE, across);
    _tile_stored(2, below, across);
    _tile_stored(3, below + SIDE, across);
    __asm__ volatile("" ::: "memory");  // nor that these write
  }

 private:
  void take(const uint16_t* keys, int64_t chunk) const {
    constexpr int across = DEPTH * sizeof(uint16_t);
    _tile_loadd(6, keys + chunk * TILE, across);
    _tile_loadd(7, keys + (chunks + chunk) * TILE, across);
  }

  void add(const uint16_t* queries, int64_t chunk) const {
    constexpr int across = DEPTH * sizeof(uint16_t);
    _tile_loadd(4, queries + chunk * TILE, across);
    _tile_loadd(5, queries + (chunks + chunk) * TILE, across);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
};

#else

// Products of queries and keys in float32. Keys are stored tile by tile, each channel by channel.
class Products {
  const int dim;
  const float* asking = nullptr;
  float* const turned;
  int count = 0;

 public:
  static size_t room(int64_t across, int64_t dim) { return (size_t)(across * dim); }

  Products(const float* keys, int64_t size, int64_t across, int64_t dim, float* room)
      : dim((int)dim), turned(room) {
    for (int64_t at = 0; at < across; at += NEAR)
      for (int i = 0; i < NEAR; i++)
        for (int c = 0; c < dim; c++)
          turned[at * dim + (size_t)c * NEAR + i] = at + i < size ? keys[(at + i) * dim + c] : 0.0f;
  }

  void ask(const float* queries, int number) { asking = queries, count = number; }

  // With the NEAR keys from ``at`` on, ``[ASKING, NEAR]``.
  void with(int64_t at, float* out) const {
    static const float zeros[2 * W] = {};
    const float* keys = turned + at * dim;
    for (int i = 0; i < NEAR; i += 2 * W) {
      int r = 0;
      for (; r + TOGETHER <= count; r += TOGETHER)
        scores_of<TOGETHER, 2>(asking + (size_t)r * dim, keys + i, zeros, dim, NEAR, out + r * NEAR + i, NEAR);
      for (; r < count; r++)
        scores_of<1, 2>(asking + (size_t)r * dim, keys + i, zeros, dim, NEAR, out + r * NEAR + i, NEAR);
    }
  }
};

#endif

void shares_of_row(const Shares& given, int64_t row) {
  const int64_t size = given.size, count = given.count, dim = given.dim;
  const int64_t across = (size + NEAR - 1) / NEAR * NEAR;
  constexpr float infinity = std::numeric_limits<float>::infinity();
  const size_t own = Products::room(across, dim);
  float* room = Memory::atleast(memory.sums, own + (size_t)across * (ASKING + 2));
  float *scores = room + own, *most = scores + across * ASKING;
  float* extra = most + across;  // after the last key, no share
  Products products(given.keys + row * size * dim, size, across, dim, room);
  const float scaling = (float)(given.scaling * LOG2E);  // scores are to base 2
  for (int64_t i = 0; i < size; i++)
    extra[i] = given.log_mass ? given.log_mass[row * size + i] * (float)LOG2E : 0.0f;
  std::fill(extra + size, extra + across, -infinity);
  std::fill(most, most + across, -infinity);
  // Of every query: the highest score, and the sum of powers relative to it, lane by lane.
  float high[ASKING], less[ASKING];
  vf sum[ASKING];
  for (int64_t begin = 0; begin < count; begin += ASKING) {
    const int asking = (int)std::min<int64_t>(ASKING, count - begin);
    products.ask(given.queries + (row * count + begin) * dim, asking);
    for (int r = 0; r < asking; r++) high[r] = UNSEEN, sum[r] = all(0.0f);
    for (int64_t at = 0; at < across; at += NEAR) {
      float* near = scores + at * ASKING;
      products.with(at, near);
      for (int r = 0; r < asking; r++) {
        vf x[NEAR / W], top = all(-infinity);
        for (int i = 0; i < NEAR / W; i++) {
          x[i] = load(near + r * NEAR + i * W) * scaling + load(extra + at + i * W);
          top = larger(x[i], top);
        }
        if (any_above(top, high[r])) {
          const float before = high[r];
          high[r] = largest(top);
          sum[r] *= power(all(before - high[r]));
        }
        for (int i = 0; i < NEAR / W; i++) sum[r] += power(x[i] - high[r]);
      }
    }
    for (int r = 0; r < asking; r++) {
      float total = 0;
      for (int k = 0; k < W; k++) total += sum[r][k];
      less[r] = high[r] + std::log2(total);
    }
    for (int64_t at = 0; at < across; at += NEAR) {
      const float* near = scores + at * ASKING;
      vf best[NEAR / W];
      for (int i = 0; i < NEAR / W; i++) best[i] = all(-infinity);
      for (int r = 0; r < asking; r++)
        for (int i = 0; i < NEAR / W; i++)
          best[i] = larger(load(near + r * NEAR + i * W) * scaling - less[r], best[i]);
      for (int i = 0; i < NEAR / W; i++) {
        float* to = most + at + i * W;
        store(to, larger(best[i] + load(extra + at + i * W), load(to)));
      }
    }
  }
  for (int64_t i = 0; i < size; i++) given.most[row * size + i] = most[i] * (float)(1 / LOG2E);
}

void share_out(void* given) {
  Shares& shares = *(Shares*)given;
  for (;;) {
    const int64_t row = shares.next.fetch_add(1);
    if (row >= shares.rows) return;
    shares_of_row(shares, row);
  }
}

}  // namespace

extern "C" void KV_JOIN(kvsketch_share_, KV_ISA)(void* given, int64_t threads, Parallel parallel) {
  Shares* shares = (Shares*)given;
  shares->next.store(0);
  if (parallel && threads > 1 && shares->rows > 1) parallel(share_out, shares, (unsigned)threads, 0);
  else share_out(shares);
}
