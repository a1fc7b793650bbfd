// The largest share of attention that any query gives a key, see kernels/shares.py. Part of
// attention.cpp.
//
// Scores of a block of queries over all keys are held at once, since a share is relative to the sum
// over all keys.

namespace {

struct Shares {
  const float *queries, *keys;  // [rows, count, dim], scaled, and [rows, size, dim]
  const float* log_mass;        // [rows, size]: added to the scores; null: 0
  float* most;                  // [rows, size]: the log of the largest share
  int64_t rows, count, size, dim;
  std::atomic<int64_t> next;
};

constexpr int ASKING = 32;  // queries of a block
constexpr int TURNED = 256;  // keys whose scores with all of them are computed together

// The keys of a row, tile by tile, each channel by channel; in the last tile, 0 after the last key.
void turn_keys(const float* keys, int64_t size, int dim, float* turned) {
  for (int64_t first = 0; first < size; first += TURNED, turned += (size_t)TURNED * dim)
    for (int i = 0; i < TURNED; i++)
      for (int c = 0; c < dim; c++)
        turned[(size_t)c * TURNED + i] = first + i < size ? keys[(first + i) * dim + c] : 0.0f;
}

void shares_of_row(const Shares& given, int64_t row, std::vector<float>& room) {
  const int64_t size = given.size, count = given.count;
  const int64_t across = (size + TURNED - 1) / TURNED * TURNED;
  const int dim = (int)given.dim;
  constexpr float infinity = std::numeric_limits<float>::infinity();
  room.resize((size_t)across * (dim + ASKING + 2));
  float *turned = room.data(), *scores = turned + across * dim, *most = scores + across * ASKING;
  float* extra = most + across;  // after the last key, no share
  turn_keys(given.keys + row * size * dim, size, dim, turned);
  std::fill(extra, extra + size, 0.0f);
  if (given.log_mass) memcpy(extra, given.log_mass + row * size, sizeof(float) * size);
  std::fill(extra + size, extra + across, -infinity);
  std::fill(most, most + across, -infinity);
  for (int64_t begin = 0; begin < count; begin += ASKING) {
    const int asking = (int)std::min<int64_t>(ASKING, count - begin);
    const float* queries = given.queries + (row * count + begin) * dim;
    for (int64_t at = 0; at < across; at += TURNED)
      for (int i = 0; i < TURNED; i += 2 * W) {
        const float* keys = turned + at * dim + i;
        int r = 0;
        for (; r + 8 <= asking; r += 8)
          scores_of<8, 2>(queries + r * dim, keys, extra + at + i, dim, TURNED,
                          scores + r * across + at + i, across);
        for (; r < asking; r++)
          scores_of<1, 2>(queries + r * dim, keys, extra + at + i, dim, TURNED,
                          scores + r * across + at + i, across);
      }
    for (int r = 0; r < asking; r++) {
      const float* own = scores + r * across;
      vf high = all(-infinity), sum = all(0.0f);
      for (int64_t i = 0; i < across; i += W) {
        const vf x = load(own + i);
        high = x > high ? x : high;
      }
      float highest = high[0];
      for (int k = 1; k < W; k++) highest = std::max(highest, high[k]);
      for (int64_t i = 0; i < across; i += W) sum += exped(load(own + i) - highest);
      float total = 0;
      for (int k = 0; k < W; k++) total += sum[k];
      const float less = highest + std::log(total);
      for (int64_t i = 0; i < across; i += W) {
        const vf x = load(own + i) - less, before = load(most + i);
        store(most + i, x > before ? x : before);
      }
    }
  }
  memcpy(given.most + row * size, most, sizeof(float) * size);
}

void share_out(void* given) {
  Shares& shares = *(Shares*)given;
  for (;;) {
    const int64_t row = shares.next.fetch_add(1);
    if (row >= shares.rows) return;
    shares_of_row(shares, row, memory.sums);
  }
}

}  // namespace

extern "C" void KV_JOIN(kvsketch_share_, KV_ISA)(void* given, int64_t threads, Parallel parallel) {
  Shares* shares = (Shares*)given;
  shares->next.store(0);
  if (parallel && threads > 1 && shares->rows > 1) parallel(share_out, shares, (unsigned)threads, 0);
  else share_out(shares);
}
