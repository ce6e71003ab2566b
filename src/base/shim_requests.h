// SPDX-License-Identifier: Apache-2.0
// What the shims ask of the library beyond the public interface. The library exports nothing but that interface,
// so the requests travel in arguments of its functions. This is a header of its own because the library and the shims
// share only this; both come in one package.
#pragma once

#include <atomic>
#include <bit>
#include <cstdint>

#include "moeccl/comm.h"

namespace moeccl {

// A moecclConfig_t with more behind it. The magic tells it from the struct of a later release, whose size it may have.
struct ShimConfig {
  static constexpr uint64_t kMagic = 0x6769'666e'6f63'5853u;

  moecclConfig_t config = {sizeof(ShimConfig), 0, 0, 0, 0, nullptr, 0, nullptr, 0, 0};
  uint64_t magic = kMagic;
  // Ends the call with moecclAborted soon after it has become true; the other ranks are told. Null: nothing does.
  const std::atomic<bool>* cancelled = nullptr;
  uint64_t without_graph_mixing = 0;  // 1: as with MOECCL_CUDA_GRAPH_MIXING=0, for this communicator

  // Returns null for an ordinary config.
  static const ShimConfig* of(const moecclConfig_t* given) {
    if (given == nullptr || given->size != sizeof(ShimConfig)) return nullptr;
    const auto* asks = reinterpret_cast<const ShimConfig*>(given);
    return asks->magic == kMagic ? asks : nullptr;
  }
};

// moecclCommGetUniqueId() with this handle, which no communicator has, makes an id as moecclGetUniqueId() does. The id
// that it is given holds a ShimIdRequest.
inline moecclComm_t shim_asks_for_id() { return reinterpret_cast<moecclComm_t>(uintptr_t{0x5853'0000'0000'00DE}); }

struct ShimIdRequest {
  int64_t timeout_ms = 0;  // how long the meeting point waits; 0: MOECCL_INIT_TIMEOUT_MS
  // "host:port" where rank 0 listens as soon as it joins; every rank makes the same id of it. Empty: the meeting point
  // begins at once, as usual.
  char place[sizeof(moecclUniqueId) - sizeof(int64_t)] = {};

  static ShimIdRequest of(const moecclUniqueId& id) {
    auto asks = std::bit_cast<ShimIdRequest>(id);
    asks.place[sizeof(asks.place) - 1] = '\0';
    return asks;
  }
};

}  // namespace moeccl
