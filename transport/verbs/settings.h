// SPDX-License-Identifier: Apache-2.0
// The user's settings for RDMA: MOECCL_IB_* variables, each with NCCL's NCCL_IB_* of the same ending as an alias, which
// counts where ours is not set. docs/verbs.md lists them.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "src/base/status.h"

namespace moeccl::transport::verbs {

// MOECCL_IB_HCA in NCCL's syntax: "mlx5" is every device whose name begins with it, "=mlx5_0:1,mlx5_1" these names
// exactly, "^mlx5_2" and "^=mlx5_2" all others; ":1" is a port. Empty: all.
class HcaFilter {
 public:
  static std::optional<HcaFilter> parse(const std::string& text);
  bool admits(const std::string& device, uint32_t port) const;

 private:
  struct Name {
    std::string device;
    uint32_t port = 0;  // 0: any
  };
  std::vector<Name> names_;
  bool exact_ = false, excludes_ = false;
};

enum class AdaptiveRouting : int8_t { kAutomatic = -1, kOff = 0, kOn = 1 };

struct Settings {
  std::string library;  // MOECCL_IB_LIBRARY: a path instead of libibverbs.so.1
  std::string why_off;  // why RDMA is turned off: MOECCL_IB_LIBRARY=none, or NCCL_IB_DISABLE=1 without that variable
  HcaFilter hca;
  std::string hca_text;
  int32_t gid_index = -1;  // -1: choose_gid()
  uint8_t traffic_class = 0, service_level = 0;
  int32_t timeout = -1;  // the local acknowledgement timeout's code, 4.096 us * 2^code; -1: by the operations' timeout
  uint8_t retry_count = 7;
  uint16_t pkey_index = 0;
  uint32_t queue_pairs = 1;  // to each peer and NIC
  AdaptiveRouting adaptive_routing = AdaptiveRouting::kAutomatic;
  std::vector<std::string> adapted;  // sentences: NCCL's values that count as others here
};

inline constexpr uint32_t kMaxQueuePairs = 8;  // QPS_PER_CONNECTION

// Returns the value of an environment variable, null when it is not set.
using Variables = std::function<const char*(const char* name)>;
// InvalidArgument names the variable, its value and what is accepted. Values that NCCL accepts for its variables and
// that are out of our range count as the nearest one, a timeout as the NIC would take it: they are meant for NCCL, and
// no reason to go without RDMA.
Result<Settings> read_settings(const Variables& variables);
// Reads the process's settings, and writes `adapted` to the log. A program with more rights than its user does not open
// the library that its user names.
Result<Settings> process_settings();

// Returns the code of the acknowledgement timeout: the setting, else the largest up to 20 (the value that users know
// from NCCL) with which all retries together end within half of an operation's timeout.
uint8_t timeout_code(const Settings& settings, int64_t operation_timeout_ms);

}  // namespace moeccl::transport::verbs
