// Some slots of parts in few bits as floats, and others instead of them, see kernels/exchange.py.
// Part of attention.cpp. The format is that of page/quantized.py.

namespace {

// What Python fills in. An owner is a KV head of a row of a part, in this order of the parts.
struct Exchange {
  const Part *const *parts, *const *others;  // [count], before and after, of the same rows and heads
  int64_t count, rows, heads;
  const int64_t *taken, *fresh;  // [owners]: slots of each that leave, and that come
  int64_t* places;               // [owners, most], of those that leave, that of the lowest score first
  int64_t most, width;           // slots of an owner in the places, and among those that come
  float *keys, *values;          // [owners, most or width, channels]
  float* columns[3];             // [owners, most or width]: log masses, positions, scores; or null
  const int64_t* in_place;       // [count]: those that come get the places of those that leave
  int64_t* far;                  // [count]: 1 if any that come are too far for the units
  double limit, farthest;        // so many units; see distance() of quantized.py
  int64_t owners;
  std::atomic<int64_t> next;
};

struct Owner {
  const Part& part;
  int64_t number, row, head;  // number: of the part
  Owner(const Exchange& all, int64_t index)
      : part(*all.parts[index / (all.rows * all.heads)]),
        number(index / (all.rows * all.heads)),
        row(index / all.heads % all.rows),
        head(index % all.heads) {}
};

struct Sorting {
  std::vector<uint64_t> order;  // scores, as numbers of the same order, and places
  std::vector<int64_t> places;
  std::vector<float> sums, most;
};
thread_local Sorting sorting;

inline float* column_of(const Part& part, int64_t row, int which) {
  const int64_t at[3] = {part.mass, part.positions, part.score};
  const int64_t stride[3] = {part.mass_row, part.position_row, part.score_row};
  return at[which] ? (float*)at[which] + row * stride[which] : nullptr;
}

inline const float* unit_of(const Side& side, int64_t row, int64_t head) {
  return (const float*)side.unit + row * side.unit_row + head * side.unit_head;
}
inline const float* offset_of(const Side& side, int64_t row, int64_t head) {
  return side.offset ? (const float*)side.offset + row * side.offset_row + head * side.offset_head
                     : nullptr;
}

// A slot as floats, of ``side.dim`` channels.
void decoded(const Side& side, const Owner& owner, int64_t slot, float* __restrict out) {
  const int dim = (int)side.dim;
  const float* __restrict unit = unit_of(side, owner.row, owner.head);
  const float* __restrict offset = offset_of(side, owner.row, owner.head);
  const uint8_t* codes = (const uint8_t*)side.data + owner.row * side.row + slot * side.slot;
  float x[MOST + 64];
  of_codes_one_by_one(
      side, codes,
      (const uint16_t*)side.step + owner.row * side.small_row + slot * side.groups, x);
  if (!offset)
    for (int c = 0; c < dim; c++) out[c] = x[c] * unit[0];
  else
    for (int c = 0; c < dim; c++) out[c] = x[c] * unit[c] + offset[c];
}

// The places of the slots with the lowest scores, and these slots.
void take_lowest(const Exchange& all, int64_t index) {
  const Owner owner(all, index);
  const int64_t size = size_of(owner.part, owner.row, owner.head), taken = all.taken[index];
  const int64_t start = start_of(owner.part, owner.row, owner.head);
  const float* score = column_of(owner.part, owner.row, 2) + start;
  auto& order = sorting.order;
  order.resize(size);
  for (int64_t i = 0; i < size; i++) {
    const float mine = score[i] + 0.0f;  // -0 becomes 0
    uint32_t bits;
    memcpy(&bits, &mine, 4);
    order[i] = (uint64_t)(bits ^ (bits >> 31 ? ~0u : 1u << 31)) << 32 | (uint64_t)i;
  }
  if (taken < size) std::nth_element(order.begin(), order.begin() + taken, order.end());
  std::sort(order.begin(), order.begin() + taken);
  const Side &keys = owner.part.keys, &values = owner.part.values;
  for (int64_t i = 0; i < all.most; i++) {
    const int64_t at = index * all.most + i;
    if (i >= taken) {
      all.places[at] = -1;
      memset(all.keys + at * keys.dim, 0, 4 * keys.dim);
      memset(all.values + at * values.dim, 0, 4 * values.dim);
      for (float* column : all.columns)
        if (column) column[at] = 0;
      continue;
    }
    const int64_t place = (int64_t)(order[i] & 0xffffffffu);
    all.places[at] = place;
    decoded(keys, owner, start + place, all.keys + at * keys.dim);
    decoded(values, owner, start + place, all.values + at * values.dim);
    for (int which = 0; which < 3; which++)
      if (all.columns[which])
        all.columns[which][at] = column_of(owner.part, owner.row, which)[start + place];
  }
}

// The least and the greatest of ``n`` numbers.
inline void ends_of(const float* x, int n, float* least, float* greatest) {
  float low = x[0], high = x[0];
  int c = 0;
  if (n >= W) {
    vf lows = load(x), highs = lows;
    for (c = W; c + W <= n; c += W) {
      const vf now = load(x + c);
      lows = now < lows ? now : lows;
      highs = now > highs ? now : highs;
    }
    high = greatest_lane(highs), low = -greatest_lane(-lows);
  }
  for (; c < n; c++) low = std::min(low, x[c]), high = std::max(high, x[c]);
  *least = low, *greatest = high;
}

// <unit * x, y>.
inline float product(const float* unit, const float* x, const float* y, int n) {
  vf sums = {};
  int c = 0;
  for (; c + W <= n; c += W) sums += load(unit + c) * load(x + c) * load(y + c);
  float sum = sum_of(sums);
  for (; c < n; c++) sum += unit[c] * x[c] * y[c];
  return sum;
}

// A slot of floats as codes and scales.
void coded(const Side& side, const Owner& owner, const float* __restrict given, int64_t slot) {
  const int dim = (int)side.dim, groups = (int)side.groups, width = (int)side.width;
  const int channels = groups * width, half = side.kind == 4 ? 8 : 128;
  const float* __restrict unit = unit_of(side, owner.row, owner.head);
  const float* __restrict offset = offset_of(side, owner.row, owner.head);
  uint8_t* __restrict codes = (uint8_t*)side.data + owner.row * side.row + slot * side.slot;
  uint16_t* steps = (uint16_t*)side.step + owner.row * side.small_row + slot * groups;
  float x[MOST + 64], rounded[MOST + 64];
  const float bottom = (float)-half, top = (float)half - 1;
  if (offset)
    for (int c = 0; c < dim; c++) x[c] = (given[c] - offset[c]) / unit[c];
  else
    for (int c = 0; c < dim; c++) x[c] = given[c] / unit[0];
  for (int c = dim; c < channels; c++) x[c] = x[dim - 1];  // which does not widen the range
  for (int group = 0; group < groups; group++) {
    const int from = group * width, own = std::min(width, dim - from);
    float least, greatest;
    ends_of(x + from, width, &least, &greatest);
    uint16_t step = to_float16((greatest > -least ? greatest : least) / bottom);
    const float now = from_half(step), scale = now == 0 ? 1.0f : now;
    for (int c = from; c < from + width; c++) {
      const float code = std::nearbyint(x[c] / scale), high = code < bottom ? bottom : code;
      rounded[c] = high > top ? top : high;
    }
    if (offset && own > 0) {  // a key keeps its length
      const float length = product(unit + from, x + from, x + from, own);
      const float found = product(unit + from, x + from, rounded + from, own) * now;
      const float ratio = found > 0 ? length / found : 1.0f, most = 0.5f / (float)half;
      step = to_float16(now * std::min(std::max(ratio, 1 - most), 1 + most));
    }
    steps[group] = step;
  }
  if (side.kind == 8) {
    for (int c = 0; c < channels; c++) codes[c] = (uint8_t)((int)rounded[c] + 128);
    return;
  }
  const int middle = channels / 2;
  for (int c = 0; c < middle; c++)
    codes[c] = (uint8_t)((int)rounded[c] + 8 + ((int)rounded[middle + c] + 8) * 16);
}

// Whether slots are too far from the centre, on average, for the unit.
bool too_far(const Exchange& all, const Side& side, const Owner& owner, const float* given, int n) {
  const int dim = (int)side.dim;
  const float *unit = unit_of(side, owner.row, owner.head),
              *offset = offset_of(side, owner.row, owner.head);
  sorting.sums.assign(dim, 0.0f), sorting.most.assign(dim, 0.0f);
  float* __restrict sums = sorting.sums.data();
  float* __restrict most = sorting.most.data();
  for (int i = 0; i < n; i++)
    for (int c = 0; c < dim; c++) {
      const float at = given[(size_t)i * dim + c], x = std::fabs(offset ? at - offset[c] : at);
      sums[c] += x;
      most[c] = x > most[c] ? x : most[c];
    }
  double total = 0, greatest = 0;
  const double count = std::max(n, 1);
  for (int c = 0; c < dim; c++) {
    const double mean = sums[c] / count, far = most[c] / all.farthest;
    if (offset && std::max(mean, far) > all.limit * unit[c]) return true;
    total += mean / dim, greatest = std::max(greatest, far);
  }
  return !offset && std::max(total, greatest) > all.limit * unit[0];
}

// Calls ``copy`` for every run of slots that stay: the first one, its new place, and how many.
template <typename F>
inline void for_each_run(const std::vector<int64_t>& leave, int64_t size, F copy) {
  int64_t from = 0, to = 0;
  for (size_t i = 0; i <= leave.size(); i++) {
    const int64_t end = i < leave.size() ? leave[i] : size;
    if (end > from) copy(from, to, end - from);
    to += end - from, from = end + 1;
  }
}

void exchange_slots(const Exchange& all, int64_t index) {
  const Owner owner(all, index);
  const Part &old = owner.part, &now = *all.others[owner.number];
  const int64_t size = size_of(old, owner.row, owner.head), taken = all.taken[index];
  const int64_t start = start_of(old, owner.row, owner.head);
  const int64_t to = start_of(now, owner.row, owner.head), n = all.fresh[index];
  auto& leave = sorting.places;
  leave.assign(all.places + index * all.most, all.places + index * all.most + taken);
  std::sort(leave.begin(), leave.end());
  const bool in_place = all.in_place[owner.number];
  static const std::vector<int64_t> none;
  const std::vector<int64_t>& gone = in_place ? none : leave;
  const int64_t kept = size - taken;
  auto place = [&](int64_t i) { return to + (in_place ? leave[i] : kept + i); };
  const Side* sides[2][2] = {{&old.keys, &now.keys}, {&old.values, &now.values}};
  for (int which = 0; which < 2; which++) {
    const Side &before = *sides[which][0], &after = *sides[which][1];
    const float* given = (which ? all.values : all.keys) + index * all.width * before.dim;
    if (too_far(all, after, owner, given, (int)n)) all.far[owner.number] = 1;
    const uint8_t* codes = (const uint8_t*)before.data + owner.row * before.row + start * before.slot;
    uint8_t* codes_to = (uint8_t*)after.data + owner.row * after.row + to * after.slot;
    const int64_t groups = before.groups;
    const uint16_t* step =
        (const uint16_t*)before.step + owner.row * before.small_row + start * groups;
    uint16_t* step_to = (uint16_t*)after.step + owner.row * after.small_row + to * groups;
    for_each_run(gone, size, [&](int64_t from, int64_t at, int64_t many) {
      memcpy(codes_to + at * after.slot, codes + from * before.slot, many * before.slot);
      memcpy(step_to + at * groups, step + from * groups, many * groups * 2);
    });
    for (int64_t i = 0; i < n; i++) coded(after, owner, given + i * before.dim, place(i));
  }
  for (int which = 0; which < 3; which++) {
    float* after = column_of(now, owner.row, which);
    if (!after) continue;
    const float *before = column_of(old, owner.row, which), *given = all.columns[which];
    for_each_run(gone, size, [&](int64_t from, int64_t at, int64_t many) {
      if (before) memcpy(after + to + at, before + start + from, many * 4);
      else std::fill(after + to + at, after + to + at + many, 0.0f);
    });
    for (int64_t i = 0; i < n; i++) after[place(i)] = given ? given[index * all.width + i] : 0.0f;
  }
}

template <void (*RUN)(const Exchange&, int64_t)>
void owners_of(void* given) {
  Exchange& all = *(Exchange*)given;
  for (;;) {
    const int64_t index = all.next.fetch_add(1);
    if (index >= all.owners) return;
    RUN(all, index);
  }
}

}  // namespace

// Takes the lowest, or, if there are parts for them, exchanges slots.
extern "C" void KV_JOIN(kvsketch_exchange_, KV_ISA)(void* given, int64_t threads,
                                                    Parallel parallel) {
  Exchange* all = (Exchange*)given;
  all->next.store(0);
  const Job job = all->others ? owners_of<exchange_slots> : owners_of<take_lowest>;
  if (parallel && threads > 1 && all->owners > 1) parallel(job, all, (unsigned)threads, 0);
  else job(all);
}
