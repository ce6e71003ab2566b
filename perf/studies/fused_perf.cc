// SPDX-License-Identifier: Apache-2.0
// Measures HybridEP's Fig. 15: the cost of encoding relative to the optimizer's step, and of decoding relative to the
// experts' computation, both after it and fused with it. Runs on one core, with a layer's experts, each of which is
// cold when its turn comes.
#include <moeccl/moeccl.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "perf/common/fail.h"
#include "perf/common/shared_options.h"
#include "perf/common/stats.h"

// Compiles the program's own arithmetic for the processor that it runs on.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif

namespace perf {
namespace {

struct Options {
  std::string what = "both";
  std::vector<size_t> expert_mib = {2, 8, 32};
  int experts = 8, iters = 7;
  size_t row = 1024, tokens = 32;
};

// ---- The program: Adam, and a matrix product ----

CLONES void adam(float* w, const float* gradient, float* m, float* v, size_t n) {
  constexpr float kBeta1 = 0.9f, kBeta2 = 0.999f, kRate = 1e-5f, kEpsilon = 1e-8f;
  for (size_t i = 0; i < n; i++) {
    const float g = gradient[i];
    const float first = m[i] + (1 - kBeta1) * (g - m[i]), second = v[i] + (1 - kBeta2) * (g * g - v[i]);
    m[i] = first;
    v[i] = second;
    w[i] -= kRate * first / (std::sqrt(second) + kEpsilon);
  }
}

// out[t][first_row + r] = x[t] . w[r], for n_rows rows of w. Lanes have kLanes floats, a register of the processor, and
// tokens go by kTokens, so that all sums stay in registers.
template <size_t kLanes, size_t kTokens>
__attribute__((always_inline)) inline void product_of(const float* w, size_t n_rows, size_t row, const float* x,
                                                      size_t tokens, float* out, size_t out_row) {
  typedef float Lanes __attribute__((vector_size(kLanes * sizeof(float))));
  constexpr size_t kRows = 4;
  for (size_t r = 0; r < n_rows; r += kRows)
    for (size_t t = 0; t < tokens; t += kTokens) {
      Lanes sum[kRows][kTokens] = {};
      for (size_t c = 0; c < row; c += kLanes) {
        Lanes a[kRows], b[kTokens];
        for (size_t i = 0; i < kRows; i++) std::memcpy(&a[i], w + (r + i) * row + c, sizeof(Lanes));
        for (size_t j = 0; j < kTokens; j++) std::memcpy(&b[j], x + (t + j) * row + c, sizeof(Lanes));
        for (size_t i = 0; i < kRows; i++)
          for (size_t j = 0; j < kTokens; j++) sum[i][j] += a[i] * b[j];
      }
      for (size_t i = 0; i < kRows; i++)
        for (size_t j = 0; j < kTokens; j++) {
          float total = 0;
          for (size_t l = 0; l < kLanes; l++) total += sum[i][j][l];
          out[(t + j) * out_row + r + i] = total;
        }
    }
}

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
__attribute__((target("arch=x86-64-v4"))) void product_v4(const float* w, size_t n_rows, size_t row, const float* x,
                                                          size_t tokens, float* out, size_t out_row) {
  product_of<16, 4>(w, n_rows, row, x, tokens, out, out_row);
}
__attribute__((target("arch=x86-64-v3"))) void product_v3(const float* w, size_t n_rows, size_t row, const float* x,
                                                          size_t tokens, float* out, size_t out_row) {
  product_of<8, 2>(w, n_rows, row, x, tokens, out, out_row);
}
#endif

void product(const float* w, size_t n_rows, size_t row, const float* x, size_t tokens, float* out, size_t out_row) {
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
  if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    return product_v4(w, n_rows, row, x, tokens, out, out_row);
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
    return product_v3(w, n_rows, row, x, tokens, out, out_row);
#endif
  product_of<4, 2>(w, n_rows, row, x, tokens, out, out_row);
}

// ---- Experts ----

void checked(moecclResult_t result, const char* function) { check(result, function, 0); }

class Layer {
 public:
  Layer(const Options& o, size_t mib) : o_(o), count_((mib << 20) / sizeof(float)), rows_(count_ / o.row) {
    codec_.count = count_;
    checked(moecclCodecBytes(&codec_, &bytes_), "moecclCodecBytes");
    uint64_t state = 1;
    const auto uniform = [&] {
      state = state * 6364136223846793005u + 1442695040888963407u;
      return static_cast<float>(state >> 40) / (1 << 23) - 1;
    };
    const auto n = static_cast<size_t>(o.experts);
    for (size_t i = 0; i < count_; i++) shared_.push_back(0.02f * uniform());
    encoded_.resize(n * bytes_);
    for (size_t i = 0; i < n * count_; i++) {
      const float u = uniform();
      weights_.push_back(shared_[i % count_] + 0.01f * u * u * u);  // most residuals are small
    }
    x_.resize(o.tokens * o.row);
    for (float& x : x_) x = uniform();
    out_.resize(n * o.tokens * rows_);
  }

  // ---- The optimizer's step ----

  void prepare_steps() {
    uint64_t state = 2;
    for (size_t i = 0; i < weights_.size(); i++) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      gradient_.push_back(static_cast<float>(state >> 40) * 1e-10f);
    }
    m_.assign(weights_.size(), 0);
    v_.assign(weights_.size(), 0);
  }
  void step(size_t first, size_t n) { adam(&weights_[first], &gradient_[first], &m_[first], &v_[first], n); }
  void step_all() {
    for (int e = 0; e < o_.experts; e++) step(static_cast<size_t>(e) * count_, count_);
  }
  void encode_all() {
    for (int e = 0; e < o_.experts; e++)
      checked(moecclCodecEncode(&codec_, expert(e), shared_.data(), encoded(e), bytes_, nullptr), "moecclCodecEncode");
  }
  void step_and_encode() {
    checked(moecclCodecEncodeFused(&codec_, weights_.data(), static_cast<size_t>(o_.experts), shared_.data(), update,
                                   this, encoded_.data(), encoded_.size(), nullptr),
            "moecclCodecEncodeFused");
  }
  void verify_encoding() {
    const std::vector<float> weights = weights_, m = m_, v = v_;
    step_all();
    encode_all();
    const std::vector<char> encoded = encoded_;
    const std::vector<float> stepped = weights_;
    weights_ = weights, m_ = m, v_ = v;
    step_and_encode();
    if (encoded != encoded_ || weights_ != stepped) fail("fused encoding gives other bytes");
  }

  // ---- The experts' computation ----

  void decode_all() {
    for (int e = 0; e < o_.experts; e++)
      checked(moecclCodecDecode(&codec_, encoded(e), bytes_, shared_.data(), expert(e)), "moecclCodecDecode");
  }
  void compute_all() {
    for (int e = 0; e < o_.experts; e++) product(expert(e), rows_, o_.row, x_.data(), o_.tokens, out(e), rows_);
  }
  void decode_and_compute() {
    moecclExpertUse_t with = MOECCL_EXPERT_USE_INIT;
    with.row = o_.row;
    with.use = use;
    with.context = this;
    for (at_ = 0; at_ < o_.experts; at_++)
      checked(moecclCodecDecodeFused(&codec_, encoded(at_), bytes_, shared_.data(), &with), "moecclCodecDecodeFused");
  }
  void verify_decoding() {
    encode_all();
    decode_all();
    compute_all();
    const std::vector<float> expected = out_;
    out_.assign(out_.size(), 0);
    decode_and_compute();
    if (expected != out_) fail("fused decoding gives other products");
  }

 private:
  static int update(void* context, int e, size_t first, size_t n) {
    auto& self = *static_cast<Layer*>(context);
    self.step(static_cast<size_t>(e) * self.count_ + first, n);
    return 0;
  }
  static int use(void* context, size_t first, size_t n, const void* values) {
    auto& self = *static_cast<Layer*>(context);
    const size_t row = self.o_.row;
    product(static_cast<const float*>(values), n / row, row, self.x_.data(), self.o_.tokens,
            self.out(self.at_) + first / row, self.rows_);
    return 0;
  }
  float* expert(int e) { return &weights_[static_cast<size_t>(e) * count_]; }
  char* encoded(int e) { return &encoded_[static_cast<size_t>(e) * bytes_]; }
  float* out(int e) { return &out_[static_cast<size_t>(e) * o_.tokens * rows_]; }

  const Options& o_;
  moecclCodec_t codec_ = MOECCL_CODEC_INIT;
  size_t count_, rows_, bytes_ = 0;
  std::vector<float> shared_, weights_, gradient_, m_, v_, x_, out_;
  std::vector<char> encoded_;
  int at_ = 0;
};

// Returns this thread's processor time, because other processes may run.
double now_ms() {
  timespec t{};
  (void)clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) * 1e3 + static_cast<double>(t.tv_nsec) / 1e6;
}

// Medians of alternating runs: the program's work alone, with the codec after or before it, and fused.
struct Times {
  double alone_ms = 0, separate_ms = 0, fused_ms = 0;
};
Times in_turns(int iters, const std::function<void()>& alone, const std::function<void()>& separate,
               const std::function<void()>& fused) {
  const std::function<void()>* all[] = {&alone, &separate, &fused};
  std::vector<double> ms[3];
  for (int i = -1; i < iters; i++)
    for (int w = 0; w < 3; w++) {
      const double start = now_ms();
      (*all[w])();
      if (i >= 0) ms[w].push_back(now_ms() - start);
    }
  return {median(ms[0]), median(ms[1]), median(ms[2])};
}

nlohmann::json row(const std::string& item, double ours) {
  return {{"paper", "HybridEP"},    {"item", "Fig. 15 " + item + ", overhead saved"},
          {"paper_value", nullptr}, {"ours", ours},
          {"how", "run"},           {"command", "build/perf/fused_perf"}};
}
void tell(const nlohmann::json& line) {
  std::printf("%s\n", line.dump().c_str());
  std::fflush(stdout);
}

// The paper saves "up to" a share, so its figure is for the size of experts that saves most.
class Part {
 public:
  Part(std::string name, double paper) : name_(std::move(name)), paper_(paper) {}
  void add(size_t mib, const Times& t) {
    const double separate = t.separate_ms - t.alone_ms, fused = t.fused_ms - t.alone_ms;
    nlohmann::json line = row(name_ + ", experts of " + std::to_string(mib) + " MiB", 1 - fused / separate);
    line.update({{"alone_ms", t.alone_ms}, {"separate_ms", t.separate_ms}, {"fused_ms", t.fused_ms}});
    tell(line);
    if (best_.is_null() || best_["ours"] < line["ours"]) best_ = row(name_ + ", best size", line["ours"]);
  }
  void finish() {
    if (best_.is_null()) return;
    best_["paper_value"] = paper_;
    tell(best_);
  }

 private:
  std::string name_;
  double paper_;
  nlohmann::json best_;
};

int fused_main(int argc, char** argv) {
  Options o;
  App app("The codec behind and fused with the program's work (HybridEP, Fig. 15); JSON lines", "fused_perf");
  app.add_option("--what", o.what, "encode, decode or both")->check(is_member({"encode", "decode", "both"}));
  app.add_option("-x,--expert", o.expert_mib, "experts (MiB, fp32)")->delimiter(',')->check(positive());
  app.add_option("-e,--experts", o.experts, "experts of the layer")->check(positive())->capture_default_str();
  app.add_option("-t,--tokens", o.tokens, "tokens of an expert; a multiple of 4")->capture_default_str();
  app.add_option("-n,--iters", o.iters, "timed runs of each")->check(positive())->capture_default_str();
  parse_or_exit(app, argc, argv);
  if (o.tokens == 0 || o.tokens % 4 != 0) fail("--tokens: give a multiple of 4");
  Part encoding("a, encoding in the optimizer's step", 0.30), decoding("b, decoding in the experts' computation", 0.45);
  for (const size_t mib : o.expert_mib) {
    Layer layer(o, mib);
    if (o.what != "decode") {
      layer.prepare_steps();
      layer.verify_encoding();
      const Times t = in_turns(
          o.iters, [&] { layer.step_all(); },
          [&] {
            layer.step_all();
            layer.encode_all();
          },
          [&] { layer.step_and_encode(); });
      encoding.add(mib, t);
    }
    if (o.what != "encode") {
      layer.verify_decoding();
      const Times t = in_turns(
          o.iters, [&] { layer.compute_all(); },
          [&] {
            layer.decode_all();
            layer.compute_all();
          },
          [&] { layer.decode_and_compute(); });
      decoding.add(mib, t);
    }
  }
  encoding.finish(), decoding.finish();
  return 0;
}

}  // namespace
}  // namespace perf

int main(int argc, char** argv) { return perf::fused_main(argc, argv); }
