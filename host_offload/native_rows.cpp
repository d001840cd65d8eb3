// Scan, choice and gather of one request in one layer: what cpu_selection.py describes, of rows
// that row_store.py holds, without Python's lock and without fresh memory.

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
    std::vector<int8_t> small;
};

constexpr int kTile = 64;  // rows that stay in the first cache while all queries meet them
constexpr int kBits = 11, kCopies = 4;

double now() {
    const auto since = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration<double>(since).count();
}

// Vectors that any compiler turns into what the machine has.
typedef float Wide __attribute__((vector_size(64)));
typedef int32_t Whole __attribute__((vector_size(64)));
typedef uint32_t Bits __attribute__((vector_size(64)));
constexpr int64_t kLanes = 16;

// Rows of whole vectors.
inline int64_t padded(int64_t rows) { return (rows + kLanes - 1) / kLanes * kLanes; }

template <class Vector, class Value>
inline Vector load(const Value* from) {
    Vector found;
    std::memcpy(&found, from, sizeof found);
    return found;
}

// Of two vectors some lanes, by number, plus those that lie `away` from them.
#define LANES(a, b, away, l0, l1, l2, l3, l4, l5, l6, l7, m0, m1, m2, m3, m4, m5, m6, m7)       \
    __builtin_shufflevector(a, b, l0 + away, l1 + away, l2 + away, l3 + away, l4 + away,        \
                            l5 + away, l6 + away, l7 + away, m0 + away, m1 + away, m2 + away,   \
                            m3 + away, m4 + away, m5 + away, m6 + away, m7 + away)
#define FOLDED(a, b, away, ...) LANES(a, b, 0, __VA_ARGS__) + LANES(a, b, away, __VA_ARGS__)

// The sums of sixteen vectors, in order: each step adds halves of two vectors into one.
inline Wide sums(const Wide* all) {
    Wide eight[8], four[4], two[2];
#pragma GCC unroll 8
    for (int n = 0; n < 8; ++n)
        eight[n] = FOLDED(all[n], all[n + 8], 8, 0, 1, 2, 3, 4, 5, 6, 7,  //
                          16, 17, 18, 19, 20, 21, 22, 23);
#pragma GCC unroll 4
    for (int n = 0; n < 4; ++n)  // four lanes each: of vectors n, n + 4, n + 8 and n + 12
        four[n] = FOLDED(eight[n], eight[n + 4], 4, 0, 1, 2, 3, 16, 17, 18, 19,  //
                         8, 9, 10, 11, 24, 25, 26, 27);
#pragma GCC unroll 2
    for (int n = 0; n < 2; ++n)
        two[n] = FOLDED(four[2 * n], four[2 * n + 1], 2, 0, 1, 16, 17, 4, 5, 20, 21,  //
                        8, 9, 24, 25, 12, 13, 28, 29);
    return FOLDED(two[0], two[1], 1, 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30);
}
#undef FOLDED
#undef LANES

// Four rows and four queries: the products' sums, those of a query next to each other. Of every 32
// values a query holds those at even places first: a row's pairs are widened in two operations.
inline Wide dot(const uint16_t* const* rows, const float* query, int64_t width) {
    Wide parts[16] = {};
    for (int64_t h = 0; h < width; h += 32)
#pragma GCC unroll 4
        for (int r = 0; r < 4; ++r) {
            const Bits bits = load<Bits>(rows[r] + h);
            const Wide even = std::bit_cast<Wide>(bits << 16);
            const Wide odd = std::bit_cast<Wide>(bits & 0xffff0000u);
#pragma GCC unroll 4
            for (int n = 0; n < 4; ++n) {
                const float* own = query + n * width + h;
                parts[4 * n + r] += load<Wide>(own) * even;
                parts[4 * n + r] += load<Wide>(own + kLanes) * odd;
            }
        }
    return sums(parts);
}

// Likewise; every partial sum is a whole number below 2^24, and so exact.
inline Wide dot(const int8_t* const* rows, const int8_t* query, int64_t width) {
    Wide found = {};
    int64_t h = 0;
#ifdef __AVX512VNNI__
    // Products are of unsigned and signed bytes: keys 128 more are 128 times the query's sum more.
    __m512i added[16] = {}, offset[4] = {};
    const __m512i sign = _mm512_set1_epi8(-128);
    for (; h + 64 <= width; h += 64) {
        __m512i own[4];
#pragma GCC unroll 4
        for (int n = 0; n < 4; ++n) {
            own[n] = load<__m512i>(query + n * width + h);
            offset[n] = _mm512_dpbusd_epi32(offset[n], sign, own[n]);
        }
#pragma GCC unroll 4
        for (int r = 0; r < 4; ++r) {
            const __m512i key = _mm512_xor_si512(load<__m512i>(rows[r] + h), sign);
#pragma GCC unroll 4
            for (int n = 0; n < 4; ++n)
                added[4 * n + r] = _mm512_dpbusd_epi32(added[4 * n + r], key, own[n]);
        }
    }
    Wide parts[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i)
        parts[i] = std::bit_cast<Wide>(
            _mm512_cvtepi32_ps(_mm512_sub_epi32(added[i], offset[i / 4])));
    found = sums(parts);
#endif
    for (int n = 0; n < 4 && h < width; ++n)
        for (int r = 0; r < 4; ++r) {
            int32_t sum = 0;
            for (int64_t i = h; i < width; ++i) sum += int32_t(query[n * width + i]) * rows[r][i];
            found[4 * n + r] += float(sum);
        }
    return found;
}

// logits[q][s], without any scale. The queries come in fours, and so do the rows that are written.
template <class Key, class Query>
void products(const Key* keys, const Query* queries, int64_t group, int64_t width, int64_t rows,
              float* logits) {
    const int64_t stride = padded(rows);
    for (int64_t at = 0; at < rows; at += kTile)
        for (int64_t q = 0; q < group; q += 4)
            for (int64_t s = at; s < std::min(at + kTile, rows); s += 4) {
                const Key* own[4];
                for (int64_t r = 0; r < 4; ++r) own[r] = keys + std::min(s + r, rows - 1) * width;
                const Wide found = dot(own, queries + q * width, width);
                for (int64_t n = 0; n < std::min<int64_t>(4, group - q); ++n)
                    for (int r = 0; r < 4; ++r) logits[(q + n) * stride + s + r] = found[4 * n + r];
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

// Places of all scores that are at least a bound, ascending.
void at_least(const float* scores, int64_t size, uint32_t least, std::vector<int32_t>& out) {
    out.resize(size + kLanes);
    int64_t taken = 0, s = 0;
#ifdef __AVX512BW__
    const __m512i edge = _mm512_set1_epi32(int32_t(least)), top = _mm512_set1_epi32(INT32_MIN);
    __m512i place = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (; s + kLanes <= size; s += kLanes) {
        const __m512i bits = load<__m512i>(scores + s);
        const __m512i flip = _mm512_or_si512(_mm512_srai_epi32(bits, 31), top);
        const __mmask16 mask = _mm512_cmpge_epu32_mask(_mm512_xor_si512(bits, flip), edge);
        const __m512i found = _mm512_maskz_compress_epi32(mask, place);
        std::memcpy(out.data() + taken, &found, sizeof found);
        taken += __builtin_popcount(mask);
        place = _mm512_add_epi32(place, _mm512_set1_epi32(kLanes));
    }
#endif
    for (; s < size; ++s) {
        out[taken] = int32_t(s);
        taken += ordered(scores[s]) >= least;
    }
    out.resize(taken);
}

// Places of the best `rank`, ascending, the lowest of equal ones.
void best(const float* scores, int64_t size, int64_t rank, Scratch& own,
          std::vector<int32_t>& out) {
    out.clear();
    if (rank <= 0) return;
    own.histogram.assign(kCopies << kBits, 0);
    int32_t* counts = own.histogram.data();
    // Several tables: equal neighbours do not wait for each other.
    for (int64_t s = 0; s < size; ++s)
        ++counts[((s % kCopies) << kBits) + (ordered(scores[s]) >> (32 - kBits))];
    int64_t above = 0;
    uint32_t bucket = (1u << kBits) - 1;
    for (;; --bucket) {
        int64_t here = 0;
        for (int c = 0; c < kCopies; ++c) here += counts[(c << kBits) + bucket];
        if (above + here >= rank) break;
        above += here;
    }
    at_least(scores, size, bucket << (32 - kBits), out);
    own.border.clear();
    for (const int32_t place : out) {
        const uint32_t value = ordered(scores[place]);
        if (value >> (32 - kBits) == bucket) own.border.push_back(value);
    }
    const int64_t place = rank - above - 1;
    std::nth_element(own.border.begin(), own.border.begin() + place, own.border.end(),
                     std::greater<uint32_t>());
    const uint32_t edge = own.border[place];
    int64_t equal = rank - above, taken = 0;
    for (int64_t i = 0; i < place; ++i) equal -= own.border[i] > edge;
    for (const int32_t each : out) {
        const uint32_t value = ordered(scores[each]);
        const bool same = value == edge && equal > 0;
        equal -= same;
        out[taken] = each;
        taken += value > edge || same;
    }
    out.resize(taken);
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

struct Softmax {
    float largest, inverse;
};

inline float total(Wide parts) {
    float sum = 0.0f;
    for (int64_t n = 0; n < kLanes; ++n) sum += parts[n];
    return sum;
}

// Scores of rows from products times `factors` of queries and, if there are any, `scales` of rows;
// false where one is not finite.
bool combine(float* logits, int64_t group, int64_t rows, bool raw, const float* factors,
             const float* scales, Softmax* told, float* scores) {
    const int64_t stride = padded(rows);
    std::fill(scores, scores + stride, 0.0f);
    const float nowhere = std::numeric_limits<float>::lowest();
    Wide odd = {};  // NaN where a logit is not finite
    for (int64_t q = 0; q < group; ++q) {
        float* own = logits + q * stride;
        for (int64_t s = rows / kLanes * kLanes; scales && s < rows; ++s) own[s] *= scales[s];
        Wide most = Wide{} - std::numeric_limits<float>::infinity(), sum = {};
        for (int64_t s = 0; s < stride; s += kLanes) {
            Wide here = load<Wide>(own + s) * factors[q];
            if (scales && s + kLanes <= rows) here *= load<Wide>(scales + s);
            for (int64_t n = rows - s; n < kLanes; ++n) here[n] = nowhere;
            std::memcpy(own + s, &here, sizeof here);
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
float quantised(const float* row, int64_t width, int8_t* out) {
    float most = 0.0f;
    for (int64_t h = 0; h < width; ++h) most = std::max(most, std::fabs(row[h]));
    const float scale = most / 127, safe = scale > 0 ? scale : 1.0f;
    for (int64_t h = 0; h < width; ++h) out[h] = int8_t(std::nearbyint(row[h] / safe));
    return scale;
}

struct Head {
    const uint16_t* keys;  // from the first scanned row on, as the next two
    const int8_t* small;
    const float *scales, *queries;
    int32_t* ids;
};

// Products of the scanned rows and, in `own.values`, the queries' factors; leaves the queries in
// `own.queries`, filled up to fours, of every 32 values those at even places first.
void scan(const Job& job, const Head& head, int64_t rows, Scratch& own) {
    const int64_t width = job.width, group = job.group, size = group * width;
    own.logits.resize(group * padded(rows));
    own.queries.assign((group + 3) / 4 * 4 * width, 0.0f);
    for (int64_t i = 0; i < size; ++i)
        own.queries[i / 32 * 32 + i % 2 * kLanes + i % 32 / 2] = head.queries[i];
    own.values.assign(group, job.scale);
    if (!head.small) {
        products(head.keys, own.queries.data(), group, width, rows, own.logits.data());
        return;
    }
    own.small.assign(own.queries.size(), 0);
    for (int64_t q = 0; q < group; ++q)
        own.values[q] *= quantised(head.queries + q * width, width, own.small.data() + q * width);
    products(head.small, own.small.data(), group, width, rows, own.logits.data());
}

// Scores of doubtful units in full precision, in `own.values`.
void rescore(const Job& job, const Head& head, const Softmax* softmax, Scratch& own) {
    const int64_t width = job.width, group = job.group, run = job.run;
    const int64_t size = int64_t(own.doubtful.size()) * run;
    own.values.assign(own.doubtful.size(), 0.0f);
    const auto row = [&](int64_t i) {
        i = std::min(i, size - 1);
        return head.keys + (own.doubtful[i / run] * run + i % run) * width;
    };
    for (int64_t i = 0; i < size; i += 4) {
        const uint16_t* rows[4];
        for (int64_t r = 0; r < 4; ++r) {
            rows[r] = row(i + r);
            for (int64_t at = 0; at < width; at += 32) __builtin_prefetch(row(i + r + 16) + at);
        }
        for (int64_t q = 0; q < group; q += 4) {
            const Wide found = dot(rows, own.queries.data() + q * width, width) * job.scale;
            for (int64_t n = 0; n < std::min<int64_t>(4, group - q); ++n)
                for (int64_t r = 0; r < std::min<int64_t>(4, size - i); ++r) {
                    const float logit = found[4 * n + r];
                    const Softmax told = softmax[q + n];
                    // Above the scan's largest by what int8 lost, at most: no overflow.
                    own.values[(i + r) / run] +=
                        job.raw ? logit : std::exp(logit - told.largest) * told.inverse;
                }
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
    const float* factors = own.values.data();
    if (!combine(own.logits.data(), job.group, rows, job.raw, factors,
                 head.small ? head.scales : nullptr, softmax.data(), scores))
        return false;
    const int64_t units = by_run(scores, rows, job.run), extra = job.extra / job.run;
    if (!head.small || wanted >= units) {
        best(scores, units, std::min(wanted, units), own, own.sure);
        write_ids(job, own.sure, head.ids);
        return true;
    }
    const int64_t certain = std::max<int64_t>(wanted - extra, 0);
    std::vector<int32_t> listed, chosen;
    best(scores, units, std::min(wanted + extra, units), own, listed);
    std::vector<float> near(listed.size());
    for (size_t i = 0; i < listed.size(); ++i) near[i] = scores[listed[i]];
    best(near.data(), int64_t(near.size()), certain, own, own.sure);
    for (int32_t& place : own.sure) place = listed[place];
    own.doubtful.clear();
    std::set_difference(listed.begin(), listed.end(), own.sure.begin(), own.sure.end(),
                        std::back_inserter(own.doubtful));
    if (!own.doubtful.empty()) rescore(job, head, softmax.data(), own);
    best(own.values.data(), int64_t(own.doubtful.size()), wanted - certain, own, chosen);
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
