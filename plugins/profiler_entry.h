// SPDX-License-Identifier: Apache-2.0
// What NCCL and MoECCL load from a profiler plugin: the structures ncclProfiler_v4 to _v6 (NCCL 2.26 and later). No
// function returns an error or lets an exception escape: what cannot be noted is left out.
#pragma once

#include <cstdint>
#include <exception>
#include <string>
#include <string_view>
#include <utility>

#include "src/profiler/abi.h"

namespace moeccl::plugins {

namespace abi = profiler::abi;

// A communicator's rank in this process.
struct Member {
  uint64_t group = 0;  // the communicator's number
  std::string name;    // the communicator's, or ""
  int rank = 0, n_ranks = 1;

  std::string title() const;  // "world, rank 3 of 8"
};

// Of `count` elements of a type by NCCL's name, such as "ncclFloat32"; 0 for another name.
uint64_t bytes_of(std::string_view type, uint64_t count);

// Plugin has these static members. Its functions may throw.
//   kMask                                                      the events that it wants
//   void* join(Member, abi::Logger)                            returns a context
//   void* begin(void* context, const abi::Descriptor&, uint64_t type)   returns an event, or null
//   void record(void* event, int state, const void* args)
//   void end(void* event)
//   void leave(void* context)
template <typename Plugin>
class ProfilerEntry {
 public:
  static abi::Plugin make(const char* name, int version) {
    using Init = void (*)();
    return version == 4 ? abi::Plugin{name, reinterpret_cast<Init>(init4), start<true>, stop, record, finalize}
                        : abi::Plugin{name, reinterpret_cast<Init>(init5), start<false>, stop, record, finalize};
  }

 private:
  template <typename Body>
  static abi::Code contained(Body&& body) {
    try {
      body();
    } catch (const std::exception&) {
    }
    return abi::kSuccess;
  }
  static abi::Code init(void** context, int* mask, uint64_t group, const char* name, int n_ranks, int rank,
                        abi::Logger log) {
    *context = nullptr;
    return contained([&] {
      *context = Plugin::join({group, name == nullptr ? "" : name, rank, n_ranks}, log);
      __atomic_store_n(mask, Plugin::kMask, __ATOMIC_RELAXED);
    });
  }
  static abi::Code init4(void** context, int* mask, const char* name, uint64_t hash, int, int n_ranks, int rank,
                         abi::Logger log) {
    return init(context, mask, hash, name, n_ranks, rank, log);
  }
  static abi::Code init5(void** context, uint64_t id, int* mask, const char* name, int, int n_ranks, int rank,
                         abi::Logger log) {
    return init(context, mask, id, name, n_ranks, rank, log);
  }
  template <bool kIsV4>
  static abi::Code start(void* context, void** event, void* descriptor) {
    *event = nullptr;
    if (context == nullptr) return abi::kSuccess;
    const auto& d = *static_cast<const abi::Descriptor*>(descriptor);
    return contained([&] {
      *event = Plugin::begin(context, d, kIsV4 ? d.type & 0xff : d.type);  // v4 leaves the other bytes unset
    });
  }
  static abi::Code stop(void* event) {
    if (event == nullptr) return abi::kSuccess;
    return contained([&] { Plugin::end(event); });
  }
  static abi::Code record(void* event, int state, void* args) {
    if (event == nullptr || args == nullptr) return abi::kSuccess;
    return contained([&] { Plugin::record(event, state, args); });
  }
  static abi::Code finalize(void* context) {
    if (context == nullptr) return abi::kSuccess;
    return contained([&] { Plugin::leave(context); });
  }
};

}  // namespace moeccl::plugins

// Exports the structures of the plugin Type.
#define MOECCL_PROFILER_PLUGIN(Type, name)                                                             \
  extern "C" {                                                                                         \
  __attribute__((visibility("default")))                                                               \
  moeccl::profiler::abi::Plugin ncclProfiler_v4 = moeccl::plugins::ProfilerEntry<Type>::make(name, 4), \
                                ncclProfiler_v5 = moeccl::plugins::ProfilerEntry<Type>::make(name, 5), \
                                ncclProfiler_v6 = moeccl::plugins::ProfilerEntry<Type>::make(name, 6); \
  }
