// SPDX-License-Identifier: Apache-2.0
// A communicator's configuration after defaults, environment and checks.
#pragma once

#include <cstdint>
#include <string>

#include "moeccl/comm.h"
#include "src/base/status.h"
#include "src/base/wire.h"

namespace moeccl::comm {

struct Config {
  int64_t timeout_ms = 0, init_timeout_ms = 0;
  bool deterministic = false;
  bool pace = false;
  int priority = 0;
  std::string topology;  // synthetic; empty: discovered
  uint64_t staging_bytes = 0;
  std::string name;
  std::string plan;              // MOECCL_PLAN
  uint32_t cuda_sms = 0;         // 0: chosen
  bool crowded = false;          // more ranks than cores, whatever its own: a part's of a communicator that is
  void* cuda_context = nullptr;  // the calling thread's at init, whose device this rank uses; null: host memory only

  static Result<Config> from(const moecclConfig_t* config);  // null: all defaults
  // moecclConfig_t.staging_bytes after defaults, environment and checks.
  static Result<uint64_t> staging_of(uint64_t given);
  // What all ranks must have alike, for the exchange at init.
  void write_agreed(Writer& out) const;
  static Config read_agreed(Reader& in);
  // "", or the first agreed field that differs, with this one's value and the other's.
  std::string difference(const Config& other) const;
};

}  // namespace moeccl::comm
