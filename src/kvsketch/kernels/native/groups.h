// Groups of slots by merging the closest in rounds, see methods/closest.py. Part of attention.cpp.
//
// Every row is grouped by one thread, from the first round to the last.

namespace {

struct Grouping {
  float* points;                 // [rows, width, dim], overwritten
  const float* weight;           // [rows, width], 0: dead
  const int64_t *sizes, *count;  // [rows]: the columns of a row, and its groups
  int64_t *index, *found;        // [rows, width], the group of every slot, and [rows]: 0 if a round
                                 // found too few edges, and the row has no groups
  int64_t rows, width, dim;
  double share;  // of the slots that a round removes at most
  std::atomic<int64_t> next;
};

constexpr int PAIR_BLOCK = 256;  // slots among which pairs are searched, as _PAIR_BLOCK of nearest.py

// Working memory of a thread that groups.
struct Rounds {
  Room room, points, weight, cost;
  std::vector<int32_t> partner, root, number, edges;
};
thread_local Rounds of_thread;

// The cost and the partner of every slot, block by block.
void partners(const float* points, int size, int dim, Rounds& now) {
  int blocks = std::max(1, (int)std::nearbyint((double)size / PAIR_BLOCK));
  const int each = (size + blocks - 1) / blocks;
  for (int first = 0; first < size; first += each) {
    const int mine = std::min(each, size - first);
    pairs_of_block(points + (size_t)first * dim, now.weight.data() + first, mine, dim,
                   now.cost.data() + first, now.partner.data() + first, now.room);
    for (int i = first; i < first + mine; i++) now.partner[i] += first;
  }
}

// Merge ``merges`` slots: the cheapest edges that lead to a slot whose own (cost, column) is smaller,
// so that there are no cycles. ``root`` is the slot into which each is merged, or itself.
bool merge_cheapest(int size, int merges, Rounds& now) {
  const float* cost = now.cost.data();
  const int32_t* partner = now.partner.data();
  auto before = [cost](int32_t i, int32_t j) {
    return cost[i] < cost[j] || (cost[i] == cost[j] && i < j);
  };
  now.edges.clear();
  for (int32_t i = 0; i < size; i++)
    if (cost[i] < std::numeric_limits<float>::infinity() && before(partner[i], i))
      now.edges.push_back(i);
  if ((int)now.edges.size() < merges) return false;
  std::nth_element(now.edges.begin(), now.edges.begin() + merges, now.edges.end(), before);
  now.edges.resize(merges);
  for (int32_t i : now.edges) now.root[i] = partner[i];
  for (int32_t i : now.edges) {
    int32_t end = now.root[i];
    while (now.root[end] != end) end = now.root[end];
    now.root[i] = end;
  }
  return true;
}

// The slots after a round: the weighted mean of every group and the sum of its weights, at its number.
void merged(const float* points, int size, int dim, int left, float* out, Rounds& now) {
  Room weight(left, 0.0f);
  std::vector<int32_t> members(left, 0);
  std::fill(out, out + (size_t)left * dim, 0.0f);
  for (int i = 0; i < size; i++)
    if (now.weight[i] > 0) members[now.number[i]]++;
  for (int i = 0; i < size; i++) {
    const float mine = now.weight[i], factor = members[now.number[i]] > 1 ? mine : 1.0f;
    if (!(mine > 0)) continue;
    weight[now.number[i]] += mine;
    float* target = out + (size_t)now.number[i] * dim;
    for (int c = 0; c < dim; c++) target[c] += points[(size_t)i * dim + c] * factor;
  }
  for (int j = 0; j < left; j++) {
    if (members[j] < 2) continue;
    const float total = std::max(weight[j], 1e-30f);
    for (int c = 0; c < dim; c++) out[(size_t)j * dim + c] /= total;
  }
  now.weight.swap(weight);
}

bool group_row(const Grouping& given, int64_t row, Rounds& now) {
  const int width = (int)given.width, dim = (int)given.dim, wanted = (int)given.count[row];
  int size = (int)given.sizes[row];
  float* points = given.points + row * width * dim;
  int64_t* index = given.index + row * width;
  now.weight.assign(given.weight + row * width, given.weight + row * width + size);
  now.points.resize((size_t)width * dim);
  now.cost.resize(width), now.partner.resize(width), now.root.resize(width), now.number.resize(width);
  float* other = now.points.data();
  for (int i = 0; i < width; i++) index[i] = i;
  for (;;) {
    const int left = std::max(wanted, size - std::max(1, (int)(size * given.share)));
    int total = 0;
    for (int i = 0; i < size; i++) total += now.weight[i] > 0, now.root[i] = i;
    const int merges = std::max(0, total - left);
    if (merges) {
      partners(points, size, dim, now);
      if (!merge_cheapest(size, merges, now)) return false;
    }
    // Dead slots share a group of their own while there are groups to spare.
    std::fill(now.number.begin(), now.number.end(), std::min(total - merges, left - 1));
    int next = 0;
    for (int i = 0; i < size; i++)
      if (now.weight[i] > 0 && now.root[i] == i) now.number[i] = next++;
    for (int i = 0; i < size; i++)
      if (now.root[i] != i) now.number[i] = now.number[now.root[i]];
    for (int i = 0; i < width; i++) index[i] = now.number[index[i]];
    if (left <= wanted) return true;
    merged(points, size, dim, left, other, now);
    std::swap(points, other);
    size = left;
  }
}

void group_rows(void* given) {
  Grouping& grouping = *(Grouping*)given;
  for (;;) {
    const int64_t row = grouping.next.fetch_add(1);
    if (row >= grouping.rows) return;
    grouping.found[row] = group_row(grouping, row, of_thread);
  }
}

}  // namespace

extern "C" void KV_JOIN(kvsketch_group_, KV_ISA)(void* given, int64_t threads, Parallel parallel) {
  Grouping* grouping = (Grouping*)given;
  grouping->next.store(0);
  if (parallel && threads > 1 && grouping->rows > 1)
    parallel(group_rows, grouping, (unsigned)threads, 0);
  else group_rows(grouping);
}
