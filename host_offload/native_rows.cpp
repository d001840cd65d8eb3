// Scan, choice and gather of one request in one layer; what cpu_selection.py describes and row_store.py
// holds, without Python's lock and without fresh memory. Plain loops that compilers vectorise.

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <iterator>
#include <limits>
#include <vector>

#ifdef __AVX512BW__
#include <immintrin.h>
#endif

namespace {

// In the order of native_rows.py's Job.
struct Job {
    const uint16_t *keys, *values;  // [K, S, H], bfloat16
    const int8_t* small;            // [K, S, H]; null: the keys themselves are scanned
    const float* scales;            // [K, S]
    const float* queries;           // [K, Q, H]
    int32_t* ids;                   // [K, count]
    uint16_t* out;                  // [K, 2, R, H]
    int64_t heads, capacity, width, group, first, end, count, run, extra, out_rows, granule;
    float scale;
    int32_t raw;                    // scores are summed as they are, without a softmax
    double began, chosen, gathered; // seconds on the steady clock
};

struct Scratch {  // of a thread, kept: fresh pages cost more than the work
    std::vector<float> logits, scores, values, queries;
    std::vector<int32_t> sure, doubtful, histogram;
    std::vector<uint32_t> border;
    std::vector<int16_t> small;
};

constexpr int kTile = 64;  // rows that stay in the first cache while all queries meet them
constexpr int kBits = 11, kCopies = 4;

double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

inline float wide(uint16_t bits) { return std::bit_cast<float>(uint32_t(bits) << 16); }

// Vectors that any compiler turns into what the machine has.
typedef float Wide __attribute__((vector_size(64)));
typedef int32_t Whole __attribute__((vector_size(64)));
typedef uint32_t Bits __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));
typedef float Four __attribute__((vector_size(16)));
constexpr int64_t kLanes = 16;

// Rows of whole vectors.
inline int64_t padded(int64_t rows) { return (rows + kLanes - 1) / kLanes * kLanes; }

template <class Vector, class Value>
inline Vector load(const Value* from) {
    Vector found;
    std::memcpy(&found, from, sizeof found);
    return found;
}

// The sums of four vectors, in order.
inline Four sums(const Wide* parts) {
    Four four[4];
    for (int n = 0; n < 4; ++n) {
        const auto eight = __builtin_shufflevector(parts[n], parts[n], 0, 1, 2, 3, 4, 5, 6, 7) +
                           __builtin_shufflevector(parts[n], parts[n], 8, 9, 10, 11, 12, 13, 14, 15);
        four[n] = __builtin_shufflevector(eight, eight, 0, 1, 2, 3) +
                  __builtin_shufflevector(eight, eight, 4, 5, 6, 7);
    }
    const auto two = [](Four a, Four b) {
        return __builtin_shufflevector(a, b, 0, 1, 4, 5) + __builtin_shufflevector(a, b, 2, 3, 6, 7);
    };
    const Four low = two(four[0], four[1]), high = two(four[2], four[3]);
    return __builtin_shufflevector(low, high, 0, 2, 4, 6) +
           __builtin_shufflevector(low, high, 1, 3, 5, 7);
}

// out[n] = query[n] . row for four queries: the row is widened once.
inline Four dot(const uint16_t* row, const float* query, int64_t width) {
    Wide parts[4] = {};
    int64_t h = 0;
    for (; h + kLanes <= width; h += kLanes) {
        const Bits bits = __builtin_convertvector(load<Halves>(row + h), Bits) << 16;
        const Wide key = std::bit_cast<Wide>(bits);
        for (int n = 0; n < 4; ++n) parts[n] += load<Wide>(query + n * width + h) * key;
    }
    Four found = sums(parts);
    for (; h < width; ++h)
        for (int n = 0; n < 4; ++n) found[n] += query[n * width + h] * wide(row[h]);
    return found;
}

// Likewise, exact.
inline Four dot(const int8_t* row, const int16_t* query, int64_t width) {
    int32_t found[4] = {};
    int64_t h = 0;
#ifdef __AVX512BW__
    Wide parts[4];
    __m512i added[4] = {};
    for (; h + 32 <= width; h += 32) {
        const __m512i key = _mm512_cvtepi8_epi16(load<__m256i>(row + h));
        for (int n = 0; n < 4; ++n)
            added[n] = _mm512_add_epi32(
                added[n], _mm512_madd_epi16(load<__m512i>(query + n * width + h), key));
    }
    for (int n = 0; n < 4; ++n) parts[n] = std::bit_cast<Wide>(_mm512_cvtepi32_ps(added[n]));
    Four sum = sums(parts);  // exact: below 2^24
#else
    Four sum = {};
#endif
    for (; h < width; ++h)
        for (int n = 0; n < 4; ++n) found[n] += int32_t(query[n * width + h]) * int32_t(row[h]);
    for (int n = 0; n < 4; ++n) sum[n] += float(found[n]);
    return sum;
}

// logits[q][s], without any scale. The queries come in fours.
template <class Key, class Query>
void products(const Key* keys, const Query* queries, int64_t group, int64_t width, int64_t rows,
              float* logits) {
    const int64_t stride = padded(rows);
    for (int64_t at = 0; at < rows; at += kTile) {
        const int64_t end = std::min(at + kTile, rows);
        for (int64_t q = 0; q < group; q += 4) {
            const int64_t some = std::min<int64_t>(4, group - q);
            for (int64_t s = at; s < end; ++s) {
                const Four found = dot(keys + s * width, queries + q * width, width);
                for (int64_t n = 0; n < some; ++n) logits[(q + n) * stride + s] = found[n];
            }
        }
    }
}

// exp(x) for x <= 0, relative error below 2e-7; 0 below -87.
inline Wide exponential(Wide x) {
    const Wide least = Wide{} - 87.0f;
    const Wide power = (x > least ? x : least) * 1.44269504f;
    const Whole whole = __builtin_convertvector(power - 0.5f, Whole);
    const Wide part = (power - __builtin_convertvector(whole, Wide)) * 0.69314718f;
    Wide sum = part * (1.0f / 720) + 1.0f / 120;
    sum = sum * part + 1.0f / 24;
    sum = sum * part + 1.0f / 6;
    sum = sum * part + 0.5f;
    sum = sum * part + 1.0f;
    sum = sum * part + 1.0f;
    const Wide found = sum * std::bit_cast<Wide>((whole + 127) << 23);
    return x < least ? Wide{} : found;
}

// Unsigned numbers in the order of the floats.
inline uint32_t ordered(float value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}

// The rank-th largest score, as an ordered number, and how many equal ones belong to the best `rank`.
struct Bound {
    uint32_t value;
    int64_t equal;
};

Bound bound(const float* scores, int64_t size, int64_t rank, Scratch& own) {
    if (rank <= 0) return {0xffffffffu, 0};
    own.histogram.assign(kCopies << kBits, 0);
    int32_t* counts = own.histogram.data();
    for (int64_t s = 0; s < size; ++s)  // several tables: equal neighbours do not wait for each other
        ++counts[((s % kCopies) << kBits) + (ordered(scores[s]) >> (32 - kBits))];
    int64_t above = 0;
    int32_t bucket = (1 << kBits) - 1;
    for (;; --bucket) {
        int64_t here = 0;
        for (int c = 0; c < kCopies; ++c) here += counts[(c << kBits) + bucket];
        if (above + here >= rank) break;
        above += here;
    }
    own.border.clear();
    for (int64_t s = 0; s < size; ++s) {
        const uint32_t value = ordered(scores[s]);
        if (value >> (32 - kBits) == uint32_t(bucket)) own.border.push_back(value);
    }
    const int64_t place = rank - above - 1;
    std::nth_element(own.border.begin(), own.border.begin() + place, own.border.end(),
                     std::greater<uint32_t>());
    const uint32_t value = own.border[place];
    int64_t larger = 0;
    for (int64_t i = 0; i < place; ++i) larger += own.border[i] > value;
    return {value, rank - above - larger};
}

// Sums of runs, in place.
int64_t by_run(float* scores, int64_t rows, int64_t run) {
    if (run == 1) return rows;
    for (int64_t unit = 0; unit < rows / run; ++unit) {
        float sum = 0;
        for (int64_t i = 0; i < run; ++i) sum += scores[unit * run + i];
        scores[unit] = sum;
    }
    return rows / run;
}

// Places of the best `rank`, ascending, the lowest of equal ones.
void best(const float* scores, int64_t size, int64_t rank, Scratch& own, std::vector<int32_t>& out) {
    out.resize(size + 1);
    const Bound edge = bound(scores, size, rank, own);
    int64_t taken = 0, equal = edge.equal;
    for (int64_t s = 0; s < size; ++s) {
        const uint32_t value = ordered(scores[s]);
        const bool same = value == edge.value && equal > 0;
        equal -= same;
        out[taken] = int32_t(s);
        taken += value > edge.value || same;
    }
    out.resize(taken);
}

struct Softmax {
    float largest, inverse;
};

inline float total(Wide parts) {
    const Wide every[4] = {parts};
    return sums(every)[0];
}

// Scores of rows from their logits; false where one is not finite.
bool combine(float* logits, int64_t group, int64_t rows, bool raw, Softmax* told, float* scores) {
    const int64_t stride = padded(rows);
    std::fill(scores, scores + stride, 0.0f);
    Wide odd = {};  // NaN where a logit is not finite
    for (int64_t q = 0; q < group; ++q) {
        float* own = logits + q * stride;
        std::fill(own + rows, own + stride, std::numeric_limits<float>::lowest());
        Wide most = Wide{} - std::numeric_limits<float>::infinity(), sum = {};
        for (int64_t s = 0; s < stride; s += kLanes) {
            const Wide here = load<Wide>(own + s);
            most = here > most ? here : most;
            odd += here * 0.0f;
        }
        float largest = most[0];
        for (int64_t n = 1; n < kLanes; ++n) largest = std::max(largest, most[n]);
        for (int64_t s = 0; s < stride && !raw; s += kLanes) {
            const Wide here = exponential(load<Wide>(own + s) - largest);
            std::memcpy(own + s, &here, sizeof here);
            sum += here;
        }
        told[q] = {largest, raw ? 1.0f : 1.0f / total(sum)};
        for (int64_t s = 0; s < rows; ++s) scores[s] += own[s] * told[q].inverse;
    }
    return total(odd) == 0.0f;
}

// As quantise_rows in cpu_selection.py.
float quantised(const float* row, int64_t width, int16_t* out) {
    float most = 0.0f;
    for (int64_t h = 0; h < width; ++h) most = std::max(most, std::fabs(row[h]));
    const float scale = most / 127, safe = scale > 0 ? scale : 1.0f;
    for (int64_t h = 0; h < width; ++h) out[h] = int16_t(std::nearbyint(row[h] / safe));
    return scale;
}

struct Head {
    const uint16_t* keys;  // from the first scanned row on, as the next two
    const int8_t* small;
    const float *scales, *queries;
    int32_t* ids;
};

// Logits of the scanned rows; leaves the queries in `own.queries`, filled up to fours.
void scan(const Job& job, const Head& head, int64_t rows, Scratch& own) {
    const int64_t width = job.width, group = job.group, size = group * width;
    own.logits.resize(group * padded(rows));
    own.queries.assign((group + 3) / 4 * 4 * width, 0.0f);
    std::copy(head.queries, head.queries + size, own.queries.begin());
    if (!head.small) {
        products(head.keys, own.queries.data(), group, width, rows, own.logits.data());
        for (float& value : own.logits) value *= job.scale;
        return;
    }
    own.small.assign(own.queries.size(), 0);
    own.values.resize(group);
    for (int64_t q = 0; q < group; ++q)
        own.values[q] = quantised(head.queries + q * width, width, own.small.data() + q * width);
    products(head.small, own.small.data(), group, width, rows, own.logits.data());
    for (int64_t q = 0; q < group; ++q) {
        float* logits = own.logits.data() + q * padded(rows);
        const float factor = own.values[q];
        for (int64_t s = 0; s < rows; ++s) logits[s] *= factor * head.scales[s] * job.scale;
    }
}

// Scores of doubtful units in full precision, in `own.values`.
void rescore(const Job& job, const Head& head, const Softmax* softmax, Scratch& own) {
    const int64_t width = job.width, group = job.group, run = job.run;
    const int64_t size = int64_t(own.doubtful.size());
    own.values.assign(size, 0.0f);
    Four found = {};
    const auto row = [&](int64_t i) { return head.keys + own.doubtful[i] * run * width; };
    for (int64_t i = 0; i < size; ++i) {
        if (i + 8 < size)
            for (int64_t at = 0; at < run * width; at += 32) __builtin_prefetch(row(i + 8) + at);
        for (int64_t at = 0; at < run * width; at += width)
            for (int64_t q = 0; q < group; ++q) {
                if (q % 4 == 0) found = dot(row(i) + at, own.queries.data() + q * width, width);
                const float logit = found[q % 4] * job.scale;
                // Above the scan's largest by what int8 lost, at most: no overflow.
                own.values[i] += job.raw ? logit
                                         : std::exp(logit - softmax[q].largest) * softmax[q].inverse;
            }
    }
}

void write_ids(const Job& job, const std::vector<int32_t>& units, int32_t* ids) {
    for (const int32_t unit : units)
        for (int64_t r = 0; r < job.run; ++r) *ids++ = int32_t(job.first + unit * job.run + r);
}

bool choose(const Job& job, const Head& head, Scratch& own) {
    const int64_t rows = job.end - job.first, wanted = job.count / job.run;
    scan(job, head, rows, own);
    std::vector<Softmax> softmax(job.group);
    own.scores.resize(padded(rows));
    float* scores = own.scores.data();
    if (!combine(own.logits.data(), job.group, rows, job.raw, softmax.data(), scores)) return false;
    const int64_t units = by_run(scores, rows, job.run), extra = job.extra / job.run;
    if (!head.small || wanted >= units) {
        best(scores, units, std::min(wanted, units), own, own.sure);
        write_ids(job, own.sure, head.ids);
        return true;
    }
    const int64_t certain = std::max<int64_t>(wanted - extra, 0);
    std::vector<int32_t> listed, chosen;
    best(scores, units, std::min(wanted + extra, units), own, listed);
    best(scores, units, certain, own, own.sure);
    own.doubtful.clear();
    std::set_difference(listed.begin(), listed.end(), own.sure.begin(), own.sure.end(),
                        std::back_inserter(own.doubtful));
    rescore(job, head, softmax.data(), own);
    best(own.values.data(), int64_t(own.values.size()), wanted - certain, own, chosen);
    for (int32_t& place : chosen) place = own.doubtful[place];
    listed.clear();
    std::merge(own.sure.begin(), own.sure.end(), chosen.begin(), chosen.end(),
               std::back_inserter(listed));
    write_ids(job, listed, head.ids);
    return true;
}

// One row; past the caches where that is possible, which would read the target first.
inline void copy(const uint16_t* from, uint16_t* to, int64_t width) {
#ifdef __AVX512BW__
    if (width % 32 == 0 && reinterpret_cast<uintptr_t>(to) % 64 == 0) {
        for (int64_t h = 0; h < width; h += 32)
            _mm512_stream_si512(reinterpret_cast<__m512i*>(to + h), load<__m512i>(from + h));
        return;
    }
#endif
    std::memcpy(to, from, 2 * width);
}

// Rows of a head, and zeros to the end of the granule that is not full.
void gather(const Job& job, const uint16_t* rows, const int32_t* ids, uint16_t* out) {
    const int64_t width = job.width, bytes = 2 * width;
    for (int64_t i = 0; i < job.count; ++i) {
        if (i + 16 < job.count)
            for (int64_t at = 0; at < width; at += 32)
                __builtin_prefetch(rows + ids[i + 16] * width + at);
        copy(rows + ids[i] * width, out + i * width, width);
    }
    const int64_t end = std::min((job.count / job.granule + 1) * job.granule, job.out_rows);
    if (end > job.count) std::memset(out + job.count * width, 0, (end - job.count) * bytes);
#ifdef __AVX512BW__
    _mm_sfence();
#endif
}

}  // namespace

// 0: done; 1: a score is not finite.
extern "C" int32_t herald_choose(Job* job) {
    thread_local Scratch own;
    job->began = now();
    const int64_t size = job->capacity * job->width;
    for (int64_t k = 0; k < job->heads; ++k) {
        const int64_t skipped = k * size + job->first * job->width;
        const Head head{job->keys + skipped, job->small ? job->small + skipped : nullptr,
                        job->small ? job->scales + k * job->capacity + job->first : nullptr,
                        job->queries + k * job->group * job->width, job->ids + k * job->count};
        if (!choose(*job, head, own)) return 1;
    }
    job->chosen = now();
    return 0;
}

extern "C" int32_t herald_gather(Job* job) {
    const int64_t size = job->capacity * job->width;
    for (int64_t k = 0; k < job->heads; ++k)
        for (int of = 0; of < 2; ++of)
            gather(*job, (of ? job->values : job->keys) + k * size, job->ids + k * job->count,
                   job->out + (2 * k + of) * job->out_rows * job->width);
    job->gathered = now();
    return 0;
}

extern "C" int32_t herald_fetch(Job* job) {
    const int32_t failed = herald_choose(job);
    return failed ? failed : herald_gather(job);
}
