// SPDX-License-Identifier: Apache-2.0
// Networks for a test that run transport/verbs on the fake libibverbs (fake_hardware/fake_ibv_control.h): one queue
// pair, many of them on two rails, and a wire that keeps no order.
#pragma once

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <map>
#include <string>

#include "tests/support/fake_hardware/fake_ibv_control.h"
#include "transport/verbs/verbs_network.h"

namespace moeccl::tests {

// Two RoCE devices of 100 Gbit/s. GID entries 0 are RoCE v1, entries 1 are v2 of an IPv4 address.
inline constexpr const char* kTwoNics =
    "nic mlx5_0 1; port 4 5 2 32 2; gid fe800000000000000000000000000001; gid 00000000000000000000ffff0a000001;"
    "nic mlx5_1 2; port 4 5 2 32 2; gid fe800000000000000000000000000002; gid 00000000000000000000ffff0a000002";

class FakeVerbs {
 public:
  static std::string library() {
    std::error_code bad;
    const auto here = std::filesystem::read_symlink("/proc/self/exe", bad).parent_path();
    // Test programs are in tests/ or in a folder of tests/support/.
    const auto own = here / "support/fake_hardware/libfake_ibverbs.so";
    return std::filesystem::exists(own, bad) ? own : here.parent_path() / "fake_hardware/libfake_ibverbs.so";
  }
  static const FakeVerbs& get() {
    static const FakeVerbs fake;
    return fake;
  }
  const fake::IbvControl& control() const { return *control_; }
  fake::IbvCounts counts() const { return counts_(); }

  // Returns the settings that a user with these variables would get. MOECCL_IB_LIBRARY is the fake.
  static Env settings(std::map<std::string, std::string> variables = {}) {
    variables["MOECCL_IB_LIBRARY"] = library();
    std::vector<std::string> entries;
    for (const auto& [name, value] : variables) entries.push_back(name + "=" + value);
    std::vector<const char*> given;
    for (const std::string& entry : entries) given.push_back(entry.c_str());
    EnvParse made = parse_env(given);
    EXPECT_TRUE(made.status.ok()) << made.status.message();
    return std::move(made.env);
  }
  // Resets the network to its default behaviour.
  void calm() const {
    control().set_delay_us(0);
    control().set_unordered(false);
    control().set_silent(false);
    control().set_down(false);
    control().refuse_regions(0);
    control().set_inline(256);
    control().set_device_memory(true, true);
    control().set_late_device(false);
  }
  // Expects no new region or queue pair, and no queue filled beyond its depth.
  void expect_as(const fake::IbvCounts& before) const {
    const fake::IbvCounts now = counts();
    EXPECT_EQ(now.pairs, before.pairs);
    EXPECT_EQ(now.regions, before.regions);
    EXPECT_EQ(now.device_regions, before.device_regions);
    EXPECT_EQ(now.queues, before.queues);
    EXPECT_EQ(now.domains, before.domains);
    EXPECT_EQ(now.contexts, before.contexts);
    EXPECT_EQ(now.pinned_bytes, before.pinned_bytes);
    EXPECT_EQ(now.overruns, before.overruns);
  }

 private:
  FakeVerbs() {
    setenv("MOECCL_TEST_MACHINE", kTwoNics, 1);
    void* const handle = dlopen(library().c_str(), RTLD_NOW | RTLD_LOCAL);
    EXPECT_NE(handle, nullptr) << dlerror();
    control_ = reinterpret_cast<const fake::IbvControl* (*)()>(dlsym(handle, "fake_ibv_control"))();
    counts_ = reinterpret_cast<fake::IbvCounts (*)()>(dlsym(handle, "fake_ibv_counts"));
  }
  const fake::IbvControl* control_ = nullptr;
  fake::IbvCounts (*counts_)() = nullptr;
};

// Every test leaves the fake's machine as it found it: no registration, no queue pair.
class OverFakeVerbs : public ::testing::Test {
 protected:
  void SetUp() override {
    fake().calm();
    before_ = fake().counts();
  }
  void TearDown() override {
    fake().calm();
    fake().expect_as(before_);
  }
  static const FakeVerbs& fake() { return FakeVerbs::get(); }
  static bool has(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }
  fake::IbvCounts before_ = {};
};

namespace fake_verbs {

inline transport::Probe probe() {
  FakeVerbs::get().calm();
  return transport::verbs::probe_with(FakeVerbs::settings());
}
inline auto one(const transport::NetworkOptions& o) {
  return transport::verbs::open_with(o, FakeVerbs::settings({{"MOECCL_IB_HCA", "=mlx5_0"}}));
}
inline auto lanes(const transport::NetworkOptions& o) {
  FakeVerbs::get().control().set_delay_us(30);
  return transport::verbs::open_with(o, FakeVerbs::settings({{"MOECCL_IB_QPS_PER_CONNECTION", "3"}}));
}
inline auto unordered(const transport::NetworkOptions& o) {
  FakeVerbs::get().control().set_delay_us(50);
  FakeVerbs::get().control().set_unordered(true);
  return transport::verbs::open_with(
      o, FakeVerbs::settings({{"MOECCL_IB_QPS_PER_CONNECTION", "2"}, {"MOECCL_IB_ADAPTIVE_ROUTING", "1"}}));
}

inline constexpr transport::Network kNetworks[] = {
    {"fake_verbs", transport::verbs::kCapabilities, probe, one},
    {"fake_verbs_lanes", transport::verbs::kCapabilities, probe, lanes},
    {"fake_verbs_unordered", transport::verbs::kCapabilities, probe, unordered},
};

}  // namespace fake_verbs
}  // namespace moeccl::tests
