// SPDX-License-Identifier: Apache-2.0
// NCCL's interface of tuner plugins, versions 3 to 7 (NCCL 2.22 to 2.32), declared by hand: layouts and values that
// NCCL relies on. Results and functions of collectives are plain ints here.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moeccl::tuner {

using Logger = void (*)(int level, unsigned long flags, const char* file, int line, const char* format, ...);
inline constexpr int kLogWarn = 2, kLogInfo = 3;
inline constexpr unsigned long kLogInit = 0x1, kLogTuning = 0x40;
inline constexpr int kNcclSuccess = 0;

// ncclFunc_t. NCCL asks for these functions and never for others.
enum Function { kBroadcast, kReduce, kAllGather, kReduceScatter, kAllReduce, kFunctions };
// Rows and columns of the table of costs, which is one block of floats: [kAlgorithms][kProtocols].
enum Algorithm { kTree, kRing, kCollnetDirect, kCollnetChain, kNvls, kNvlsTree, kPat, kAlgorithms };
enum Protocol { kLL, kLL128, kSimple, kProtocols };
inline constexpr float kIgnore = -1.0f;  // the entry is not to be used, and must stay

struct NvlDomains {  // since v5
  int n_domains, least_ranks, most_ranks;
};

// The beginning of NCCL's own constants, in microseconds. It is the same in v5 to v7; what follows differs and is not
// read.
enum Hardware { kNvlink, kPci, kNet, kHardware };
struct Constants {
  double base[kAlgorithms][kProtocols];
  double hop[kHardware][kAlgorithms][kProtocols];
};

struct PluginV3 {
  const char* name;
  int (*init)(size_t n_ranks, size_t n_nodes, Logger log, void** context);
  int (*get_coll_info)(void* context, int function, size_t bytes, int n_ops, float** table, int n_algorithms,
                       int n_protocols, int* n_channels);
  int (*destroy)(void* context);
};

using GetCollInfo = int (*)(void* context, int function, size_t bytes, int n_ops, float** table, int n_algorithms,
                            int n_protocols, int registered, int* n_channels);
struct PluginV4 {
  const char* name;
  int (*init)(size_t n_ranks, size_t n_nodes, Logger log, void** context);
  GetCollInfo get_coll_info;
  int (*destroy)(void* context);
};

using Init5 = int (*)(void** context, uint64_t comm_id, size_t n_ranks, size_t n_nodes, Logger log, NvlDomains* domains,
                      Constants* constants);
struct PluginV5 {
  const char* name;
  Init5 init;
  GetCollInfo get_coll_info;
  int (*finalize)(void* context);
};

struct PluginV6 {  // also v7, whose constants are longer
  const char* name;
  Init5 init;
  GetCollInfo get_coll_info;
  int (*finalize)(void* context);
  // May be null: NCCL then uses its own chunk size.
  int (*get_chunk_size)(void* context, int function, size_t bytes, int algorithm, int protocol, int n_channels,
                        size_t* chunk_bytes);
};

}  // namespace moeccl::tuner
