// SPDX-License-Identifier: Apache-2.0
// Calls the handlers of moeccl.jax through XLA's structures, without JAX. Ranks are threads.
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <thread>

#include "moeccl/moeccl.h"
#include "tests/jax/xla_side.h"

namespace moeccl::testing {
namespace {

using Floats = std::vector<float>;
using Ints = std::vector<int32_t>;
constexpr auto kF32 = XLA_FFI_DataType_F32;
constexpr auto kS32 = XLA_FFI_DataType_S32;

// Communicators of this process with their numbers.
class JaxHandlers : public ::testing::Test {
 protected:
  static constexpr int kRanks = 2;
  void SetUp() override {
    moecclConfig_t config = MOECCL_CONFIG_INIT;
    config.timeout_ms = 20000;
    ASSERT_EQ(moecclCommInitAll(comms_.data(), kRanks, &config), moecclSuccess) << moecclGetLastError(nullptr);
    for (int r = 0; r < kRanks; ++r) numbers_[r] = jax_function<int64_t(moecclComm_t)>("AddComm")(comms_[r]);
  }
  void TearDown() override {
    for (const int64_t number : numbers_) jax_function<void(int64_t)>("RemoveComm")(number);
    for (moecclComm_t comm : comms_) EXPECT_EQ(moecclCommDestroy(comm), moecclSuccess);
  }
  template <typename Work>
  static void on_ranks(Work work) {
    std::vector<std::thread> threads;
    for (int r = 0; r < kRanks; ++r) threads.emplace_back(work, r);
    for (std::thread& t : threads) t.join();
  }

  std::array<moecclComm_t, kRanks> comms_{};
  std::array<int64_t, kRanks> numbers_{};
};

TEST_F(JaxHandlers, AMetadataQueryGetsXlasVersionAsFarAsWeKnowIt) {
  XlaCall call;
  for (const auto& [xla, answer] : {std::pair{1, 1}, {3, 3}, {9, 3}}) {
    call.version(0, xla);
    const XLA_FFI_Metadata metadata = call.metadata("AllReduce");
    EXPECT_EQ(metadata.api_version.major_version, 0);
    EXPECT_EQ(metadata.api_version.minor_version, answer);
    EXPECT_EQ(metadata.traits, 0u) << "XLA must not capture a collective in a CUDA graph";
  }
  call.version(1, 0);  // XLA then refuses the handler by itself
  EXPECT_EQ(call.metadata("Route").api_version.major_version, 0);
  EXPECT_EQ(call.metadata("Combine", /*with_api=*/false).api_version.minor_version, 1);
}

TEST_F(JaxHandlers, ACallOfAnotherMajorVersionIsRefused) {
  XlaCall call;
  call.version(1, 4);
  const Outcome refused = call.run("AllReduce");
  EXPECT_EQ(refused.code, XLA_FFI_Error_Code_UNIMPLEMENTED);
  EXPECT_NE(refused.message.find("XLA FFI is version 1.4"), std::string::npos) << refused.message;
}

TEST_F(JaxHandlers, StagesBeforeTheExecutionDoNothing) {
  for (const int stage : {0, 1, 2}) EXPECT_TRUE(XlaCall().run("AllReduce", XLA_FFI_ExecutionStage(stage)).ok);
}

TEST_F(JaxHandlers, CollectivesReadTheirBuffersBehindTheToken) {
  on_ranks([&](int rank) {
    const float mine = static_cast<float>(rank + 1);
    Floats x{mine, 10 * mine}, sum(2), all(4), part(1), turned(2), least(2), from1(2), at1(2);
    const auto call = [&](const char* name, Floats& out, std::vector<int64_t> in_dims, std::vector<int64_t> out_dims) {
      const Outcome done = XlaCall()
                               .token()
                               .in(x.data(), kF32, in_dims)
                               .out(out.data(), kF32, out_dims)
                               .attribute("comm", numbers_[rank])
                               .attribute("op", moecclSum)
                               .attribute("root", 1)
                               .run(name);
      EXPECT_TRUE(done.ok) << name << ": " << done.message;
    };
    call("AllReduce", sum, {2}, {2});
    EXPECT_EQ(sum, (Floats{3, 30}));
    call("AllGather", all, {2}, {2, 2});
    EXPECT_EQ(all, (Floats{1, 10, 2, 20}));
    call("ReduceScatter", part, {2, 1}, {1});
    EXPECT_EQ(part, (Floats{rank == 0 ? 3.f : 30.f}));
    call("AllToAll", turned, {2, 1}, {2, 1});
    EXPECT_EQ(turned, rank == 0 ? (Floats{1, 2}) : (Floats{10, 20}));
    call("Broadcast", from1, {2}, {2});
    EXPECT_EQ(from1, (Floats{2, 20}));
    call("Reduce", at1, {2}, {2});
    if (rank == 1) {
      EXPECT_EQ(at1, (Floats{3, 30}));
    }
  });
}

TEST_F(JaxHandlers, ComplexNumbersAndShortIntegersTravelAsTheirParts) {
  on_ranks([&](int rank) {
    Floats z{1.f, static_cast<float>(rank)}, sum(2);
    EXPECT_TRUE(XlaCall()
                    .in(z.data(), XLA_FFI_DataType_C64, {})
                    .out(sum.data(), XLA_FFI_DataType_C64, {})
                    .attribute("comm", numbers_[rank])
                    .attribute("op", moecclSum)
                    .run("AllReduce")
                    .ok);
    EXPECT_EQ(sum, (Floats{2, 1}));
    const int16_t mine = static_cast<int16_t>(1000 + rank);
    std::array<int16_t, kRanks> all{};
    EXPECT_TRUE(XlaCall()
                    .in(&mine, XLA_FFI_DataType_S16, {})
                    .out(all.data(), XLA_FFI_DataType_S16, {2})
                    .attribute("comm", numbers_[rank])
                    .run("AllGather")
                    .ok);
    EXPECT_EQ(all[1], 1001);
  });
}

TEST_F(JaxHandlers, OnAStreamTheCallReturnsBeforeTheOtherRankComes) {
  std::array<Floats, kRanks> x{Floats{1}, Floats{2}}, sum{Floats(1), Floats(1)};
  std::array<moecclStream_t, kRanks> streams{};
  for (int r = 0; r < kRanks; ++r) {
    ASSERT_EQ(moecclStreamCreate(&streams[r]), moecclSuccess);
    const Outcome done = XlaCall(streams[r])
                             .token()
                             .in(x[r].data(), kF32, {1})
                             .out(sum[r].data(), kF32, {1})
                             .attribute("comm", numbers_[r])
                             .attribute("op", moecclSum)
                             .run("AllReduceOnStream");
    EXPECT_TRUE(done.ok) << done.message;
  }
  on_ranks([&](int rank) { EXPECT_EQ(moecclStreamSynchronize(streams[rank]), moecclSuccess); });
  for (int r = 0; r < kRanks; ++r) {
    EXPECT_EQ(sum[r], Floats{3});
    EXPECT_EQ(moecclStreamDestroy(streams[r]), moecclSuccess);
  }
}

TEST_F(JaxHandlers, WithoutAStreamTheErrorHasXlasTextAndXlasErrorIsDestroyed) {
  Floats x(1), out(1);
  const Outcome refused = XlaCall(nullptr, "the device has gone")
                              .in(x.data(), kF32, {1})
                              .out(out.data(), kF32, {1})
                              .attribute("comm", numbers_[0])
                              .attribute("op", moecclSum)
                              .run("AllReduceOnStream");
  EXPECT_EQ(refused.code, XLA_FFI_Error_Code_INTERNAL);
  EXPECT_NE(refused.message.find("XLA has no stream for this call: the device has gone"), std::string::npos)
      << refused.message;
  EXPECT_EQ(XLA_FFI_Error::alive, 0);
}

TEST_F(JaxHandlers, ErrorsNameTheCallAndSayWhatToDo) {
  Floats x(3), out(3);
  const auto refused = [&](XlaCall& call, const char* name, int code, const char* part) {
    const Outcome outcome = call.run(name);
    EXPECT_EQ(outcome.code, code) << outcome.message;
    EXPECT_NE(outcome.message.find(part), std::string::npos) << outcome.message;
  };
  XlaCall unknown, fewer, mute, odd, wrong, strange;
  unknown.in(x.data(), kF32, {3}).out(out.data(), kF32, {3}).attribute("comm", 1 << 20).attribute("op", 0);
  refused(unknown, "AllReduce", XLA_FFI_Error_Code_FAILED_PRECONDITION,
          "moeccl.all_reduce: communicator 1048576 of this");
  fewer.in(x.data(), kF32, {3}).attribute("comm", numbers_[0]).attribute("op", 0);
  refused(fewer, "AllReduce", XLA_FFI_Error_Code_INVALID_ARGUMENT, "1 arguments and 0 results");
  mute.in(x.data(), kF32, {3}).out(out.data(), kF32, {3}).attribute("comm", numbers_[0]);
  refused(mute, "AllReduce", XLA_FFI_Error_Code_INVALID_ARGUMENT, "no int64 attribute 'op'");
  odd.in(x.data(), kF32, {3}).out(out.data(), kF32, {3}).attribute("comm", numbers_[0]);
  refused(odd, "AllToAll", XLA_FFI_Error_Code_INVALID_ARGUMENT, "do not fit 2 ranks");
  wrong.in(x.data(), kF32, {3}).out(out.data(), kF32, {3}).attribute("comm", numbers_[0]).attribute("root", 7);
  refused(wrong, "Broadcast", XLA_FFI_Error_Code_INVALID_ARGUMENT, "moecclInvalidArgument: ");
  strange.in(x.data(), XLA_FFI_DataType(28), {3})
      .out(out.data(), XLA_FFI_DataType(28), {3})
      .attribute("comm", numbers_[0]);
  refused(strange, "AllGather", XLA_FFI_Error_Code_INVALID_ARGUMENT, "element type 28");
}

// Two ranks with two experts each; each token chooses expert t % 4 and the next one.
class JaxLayer : public JaxHandlers {
 protected:
  static constexpr int64_t kTokens = 4, kTopK = 2, kHidden = 3, kLocal = 2, kRoom = kRanks * kTokens * kTopK;

  void SetUp() override {
    JaxHandlers::SetUp();
    on_ranks([&](int rank) { layers_[rank] = make_layer(rank); });
  }
  void TearDown() override {
    for (int r = 0; r < kRanks; ++r)
      for (const auto& [layer, moe] : made_[r]) {
        jax_function<void(int64_t)>("RemoveLayer")(layer);
        EXPECT_EQ(moecclMoeDestroy(moe), moecclSuccess);
      }
    JaxHandlers::TearDown();
  }
  // Makes a layer, on all ranks, and returns its number. It ends with the test.
  int64_t make_layer(int rank) {
    moecclMoeConfig_t config = MOECCL_MOE_CONFIG_INIT;
    config.hidden_bytes = kHidden * sizeof(float);
    config.type = moecclFloat32;
    config.top_k = kTopK;
    config.n_experts = kRanks * kLocal;
    config.max_tokens = kTokens;
    config.layout = moecclLayoutExpertMajor;
    moecclMoe_t moe = nullptr;
    EXPECT_EQ(moecclMoeCreate(&moe, comms_[rank], &config), moecclSuccess) << moecclGetLastError(comms_[rank]);
    const int64_t layer = jax_function<int64_t(int64_t, moecclMoe_t, size_t, size_t, size_t, size_t)>("AddLayer")(
        numbers_[rank], moe, config.hidden_bytes, kTopK, kRoom, /*routings=*/2);
    made_[rank].emplace_back(layer, moe);
    return layer;
  }

  // One rank's arrays of a step.
  struct Arrays {
    Ints index = Ints(kTokens * kTopK), rows_of = Ints(kLocal), tokens_of = Ints(kLocal);
    Floats weight = Floats(kTokens * kTopK), x = Floats(kTokens * kHidden), rows = Floats(kRoom * kHidden, NAN),
           y = Floats(kTokens * kHidden, NAN), grad_rows = rows, grad_weight = Floats(kTokens * kTopK, NAN);
    std::array<uint32_t, 2> number{};
    int32_t dropped = -1;

    explicit Arrays(int rank, int shift = 0) {
      for (int t = 0; t < kTokens; ++t) {
        for (int k = 0; k < kTopK; ++k) {
          index[t * kTopK + k] = (t + k + shift) % (kRanks * kLocal);
          weight[t * kTopK + k] = 0.25f * static_cast<float>((k + 1) * (shift + 1));
        }
        for (int h = 0; h < kHidden; ++h) x[t * kHidden + h] = static_cast<float>(100 * rank + 10 * t + h + 1);
      }
    }
    XlaCall& choices(XlaCall& call) {
      call.in(index.data(), kS32, {kTokens, kTopK}).in(weight.data(), kF32, {kTokens, kTopK});
      return call.in(number.data(), XLA_FFI_DataType_U32, {2});
    }
  };
  Outcome route(int rank, Arrays& a) {
    return XlaCall()
        .token()
        .in(a.index.data(), kS32, {kTokens, kTopK})
        .in(a.weight.data(), kF32, {kTokens, kTopK})
        .out(a.number.data(), XLA_FFI_DataType_U32, {2})
        .out(a.rows_of.data(), kS32, {kLocal})
        .out(a.tokens_of.data(), kS32, {kLocal})
        .out(&a.dropped, kS32, {})
        .attribute("layer", layers_[rank])
        .run("Route");
  }
  Outcome dispatch(int rank, Arrays& a) {
    XlaCall call;
    call.token().in(a.x.data(), kF32, {kTokens, kHidden}).attribute("layer", layers_[rank]);
    return a.choices(call).out(a.rows.data(), kF32, {kRoom, kHidden}).run("Dispatch");
  }
  Outcome combine(int rank, Arrays& a, const char* name = "Combine") {
    XlaCall call;
    call.token().in(a.rows.data(), kF32, {kRoom, kHidden}).attribute("layer", layers_[rank]);
    return a.choices(call).out(a.y.data(), kF32, {kTokens, kHidden}).run(name);
  }
  // y = scale * x, element by element
  static void expect_scaled(const Arrays& a, float scale) {
    for (size_t i = 0; i < a.x.size(); ++i) EXPECT_FLOAT_EQ(a.y[i], scale * a.x[i]) << i;
  }

  std::array<std::vector<std::pair<int64_t, moecclMoe_t>>, kRanks> made_;
  std::array<int64_t, kRanks> layers_{};  // that the calls use
};

TEST_F(JaxLayer, DispatchAndCombineBringTokensBackWeightedAndFillTheRestWithZeros) {
  on_ranks([&](int rank) {
    Arrays a(rank);
    ASSERT_TRUE(route(rank, a).ok);
    EXPECT_EQ(a.tokens_of, (Ints{4, 4}));
    EXPECT_EQ(a.rows_of, (Ints{4, 4}));
    EXPECT_EQ(a.dropped, 0);
    ASSERT_TRUE(dispatch(rank, a).ok);
    for (size_t i = 8 * kHidden; i < a.rows.size(); ++i) EXPECT_EQ(a.rows[i], 0) << i;
    ASSERT_TRUE(combine(rank, a).ok);
    expect_scaled(a, 0.75f);  // the weights' sum
    ASSERT_TRUE(combine(rank, a, "DispatchBackward").ok);
    expect_scaled(a, 2);  // the plain sum of two rows
  });
}

TEST_F(JaxLayer, CombinesBackwardGivesTheGradientsOfRowsAndWeights) {
  on_ranks([&](int rank) {
    Arrays a(rank);
    ASSERT_TRUE(route(rank, a).ok);
    ASSERT_TRUE(dispatch(rank, a).ok);
    XlaCall both, rows_only;
    both.token().in(a.x.data(), kF32, {kTokens, kHidden}).in(a.rows.data(), kF32, {kRoom, kHidden});
    a.choices(both).out(a.grad_rows.data(), kF32, {kRoom, kHidden}).out(a.grad_weight.data(), kF32, {kTokens, kTopK});
    Outcome done = both.attribute("layer", layers_[rank]).run("CombineBackwardWeights");
    ASSERT_TRUE(done.ok) << done.message;
    for (int t = 0; t < kTokens; ++t) {
      float square = 0;  // the rows are the tokens, and so is the gradient of y
      for (int h = 0; h < kHidden; ++h) square += a.x[t * kHidden + h] * a.x[t * kHidden + h];
      for (int k = 0; k < kTopK; ++k) EXPECT_FLOAT_EQ(a.grad_weight[t * kTopK + k], square);
    }
    const Floats with_weights = a.grad_rows;
    for (size_t i = 8 * kHidden; i < a.rows.size(); ++i) EXPECT_EQ(with_weights[i], 0) << i;
    a.grad_rows.assign(a.grad_rows.size(), NAN);
    rows_only.token().in(a.x.data(), kF32, {kTokens, kHidden});
    a.choices(rows_only).out(a.grad_rows.data(), kF32, {kRoom, kHidden});
    done = rows_only.attribute("layer", layers_[rank]).run("CombineBackward");
    ASSERT_TRUE(done.ok) << done.message;
    EXPECT_EQ(a.grad_rows, with_weights);
  });
}

TEST_F(JaxLayer, ARoutingThatIsNoLongerInMemoryIsMadeAgain) {
  on_ranks([&](int rank) {
    std::vector<Arrays> steps;  // one more than stay in memory
    for (int s = 0; s < 3; ++s) {
      steps.emplace_back(rank, s);
      ASSERT_TRUE(route(rank, steps.back()).ok);
    }
    EXPECT_NE(steps[0].number, steps[1].number);
    for (int s : {2, 2, 0, 1, 0, 2}) {
      ASSERT_TRUE(dispatch(rank, steps[s]).ok);
      ASSERT_TRUE(combine(rank, steps[s]).ok);
      expect_scaled(steps[s], 0.75f * static_cast<float>(s + 1));  // its own weights
    }
  });
}

TEST_F(JaxLayer, ARoutingOfAnotherLayerIsMadeAgainFromItsOwnChoices) {
  on_ranks([&](int rank) {
    Arrays first(rank, 0), second(rank, 1);
    ASSERT_TRUE(route(rank, first).ok);
    layers_[rank] = make_layer(rank);
    ASSERT_TRUE(route(rank, second).ok);
    for (Arrays* a : {&first, &second}) {
      ASSERT_TRUE(dispatch(rank, *a).ok);
      ASSERT_TRUE(combine(rank, *a).ok);
    }
    expect_scaled(first, 0.75f);
    expect_scaled(second, 1.5f);
  });
}

TEST_F(JaxLayer, RemovingACommunicatorWaitsForTheCallThatRunsAndRefusesLaterOnes) {
  using namespace std::chrono_literals;
  Arrays mine(0), late(1);
  std::atomic<bool> peer_came = false;
  std::thread program([&] {
    const Outcome done = route(0, mine);
    EXPECT_TRUE(done.ok) << done.message;
  });
  std::this_thread::sleep_for(300ms);  // the call waits for rank 1
  std::thread closing([&] {
    jax_function<void(int64_t)>("RemoveComm")(numbers_[0]);
    EXPECT_TRUE(peer_came) << "removed while a call used it";
  });
  std::this_thread::sleep_for(300ms);
  peer_came = true;
  EXPECT_TRUE(route(1, late).ok);
  program.join();
  closing.join();
  const Outcome refused = route(0, mine);
  EXPECT_EQ(refused.code, XLA_FFI_Error_Code_FAILED_PRECONDITION);
  EXPECT_NE(refused.message.find("moeccl.route: the communicator of layer"), std::string::npos) << refused.message;
  EXPECT_NE(refused.message.find("from a new function or after jax.clear_caches()"), std::string::npos);
}

TEST_F(JaxLayer, AClosedLayerAndBuffersOfAnotherLayerAreRefused) {
  Arrays a(0);
  XlaCall narrow;
  narrow.in(a.index.data(), kS32, {kTokens, kTopK}).in(a.weight.data(), kF32, {kTokens, 1});
  narrow.out(a.number.data(), XLA_FFI_DataType_U32, {2}).out(a.rows_of.data(), kS32, {kLocal});
  narrow.out(a.tokens_of.data(), kS32, {kLocal}).out(&a.dropped, kS32, {}).attribute("layer", layers_[0]);
  Outcome refused = narrow.run("Route");
  EXPECT_EQ(refused.code, XLA_FFI_Error_Code_INVALID_ARGUMENT);
  EXPECT_NE(refused.message.find("topk_weights has 16 bytes, and this layer's has 32"), std::string::npos)
      << refused.message;
  jax_function<void(int64_t)>("RemoveLayer")(layers_[0]);
  refused = route(0, a);
  EXPECT_EQ(refused.code, XLA_FFI_Error_Code_FAILED_PRECONDITION);
  EXPECT_NE(refused.message.find("moeccl.route: layer"), std::string::npos) << refused.message;
}

}  // namespace
}  // namespace moeccl::testing
