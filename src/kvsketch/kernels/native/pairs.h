// The cheapest partner of every slot within its block, see methods/nearest.py. Part of attention.cpp.
//
// A cost is that of a pair, (|x|^2 + |y|^2 - 2 <x, y>) / (1/m + 1/n) for points x and y of weights m
// and n: it is computed once, for both, so that both have the same.

namespace {

constexpr int ROWS = 8;  // of a block whose costs are computed together

// Costs of R slots from ``first`` on, and the W * V slots from ``at`` on: only those after the first
// one of each pair are new.
template <int R, int V>
inline void pair_costs(const float* points, const float* turned, const float* norm,
                       const float* per_weight, int dim, int wide, int first, int at, float* low,
                       int32_t* partner, vf* least, vi* which) {
  vf sums[R][V] = {};
  for (int c = 0; c < dim; c++) {
    vf y[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) y[v] = load(turned + (size_t)c * wide + at + v * W);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const vf x = all(points[(size_t)(first + r) * dim + c]);
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) sums[r][v] += x * y[v];
    }
  }
  vi step;
  for (int k = 0; k < W; k++) step[k] = k;
#pragma GCC unroll 4
  for (int v = 0; v < V; v++) {
    const int from = at + v * W;
    const vi column = step + from;
    vf below = load(low + from);
    vi by = *(const vi*)(partner + from);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      vf cost = (load(norm + from) + norm[first + r] - 2.0f * sums[r][v]) /
                (load(per_weight + from) + per_weight[first + r]);
      const vi earlier = column <= first + r;
      cost = earlier ? all(std::numeric_limits<float>::infinity()) : cost;
      const vi less = cost < least[r];
      least[r] = less ? cost : least[r];
      which[r] = less ? column : which[r];
      const vi lower = cost < below;
      below = lower ? cost : below;
      by = lower ? vi{} + (first + r) : by;
    }
    store(low + from, below);
    *(vi*)(partner + from) = by;
  }
}

template <int R>
inline void rows_of_pairs(const float* points, const float* turned, const float* norm,
                          const float* per_weight, int dim, int wide, int first, float* low,
                          int32_t* partner) {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  constexpr int V = 2;
  vf least[R];
  vi which[R];
  for (int r = 0; r < R; r++) least[r] = all(infinity), which[r] = vi{};
  int at = first / W * W;
  for (; at + V * W <= wide; at += V * W)
    pair_costs<R, V>(points, turned, norm, per_weight, dim, wide, first, at, low, partner, least,
                     which);
  for (; at < wide; at += W)
    pair_costs<R, 1>(points, turned, norm, per_weight, dim, wide, first, at, low, partner, least,
                     which);
  for (int r = 0; r < R; r++)  // of equal costs the first partner's
    for (int k = 0; k < W; k++) {
      float& best = low[first + r];
      const float cost = least[r][k];
      const int32_t column = which[r][k];
      if (cost < best || (cost == best && cost < infinity && column < partner[first + r]))
        best = cost, partner[first + r] = column;
    }
}

// The lowest cost of each of ``size`` slots and its partner; infinity and any for a slot of weight 0
// and for one without others.
void pairs_of_block(const float* points, const float* weight, int size, int dim, float* lowest,
                    int32_t* with, Room& room) {
  const int wide = (size + W - 1) / W * W;
  constexpr float infinity = std::numeric_limits<float>::infinity();
  room.resize((size_t)wide * (dim + 4));
  float *turned = room.data(), *norm = turned + (size_t)wide * dim, *per_weight = norm + wide,
        *low = per_weight + wide;
  int32_t* partner = (int32_t*)(low + wide);
  for (int i = 0; i < wide; i++) {
    float sum = 0;
    for (int c = 0; c < dim; c++) {
      const float x = i < size ? points[(size_t)i * dim + c] : 0.0f;
      turned[(size_t)c * wide + i] = x;
      sum += x * x;
    }
    const bool live = i < size && weight[i] > 0;
    norm[i] = live ? sum : infinity;
    per_weight[i] = live ? 1.0f / std::max(weight[i], 1e-30f) : 1.0f;
    low[i] = infinity;
    partner[i] = 0;
  }
  int first = 0;
  for (; first + ROWS <= size; first += ROWS)
    rows_of_pairs<ROWS>(points, turned, norm, per_weight, dim, wide, first, low, partner);
  for (; first < size; first++)
    rows_of_pairs<1>(points, turned, norm, per_weight, dim, wide, first, low, partner);
  for (int i = 0; i < size; i++) {
    lowest[i] = std::max(low[i], 0.0f);  // below 0 by rounding
    with[i] = partner[i];
  }
}

}  // namespace
