// SPDX-License-Identifier: Apache-2.0
// The binary interface of NCCL's profiler plugins, versions 2 to 6 (NCCL 2.24 to 2.30), declared by hand: the layouts
// and values that a host and a plugin rely on. tests/unit/exec/profiler_abi_test.cc pins each offset.
//
// Changes: v3 drops the traffic of a collective; v4 takes the communicator's name and hash from each event to init, and
// gives the events of kernels their times; v5 adds the calls (group, collective and message) as parents of the events,
// and widens the type of an event; v6 adds events of copy engines.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

namespace moeccl::profiler::abi {

inline constexpr int kOldest = 2, kNewest = 6;

// ncclResult_t
using Code = int;
inline constexpr Code kSuccess = 0;

// ncclDebugLogger_t; levels 2 WARN, 3 INFO, 5 TRACE.
using Logger = void (*)(int level, unsigned long flags, const char* file, int line, const char* text, ...);
inline constexpr int kLogWarn = 2, kLogInfo = 3;
inline constexpr unsigned long kLogInit = 0x1;

// Types of events, which are also the bits of the activation mask.
enum Event : int {
  kGroup = 1 << 0,  // what is started together; the parent of kColl and kP2p before v5
  kColl = 1 << 1,
  kP2p = 1 << 2,
  kProxyOp = 1 << 3,
  kProxyStep = 1 << 4,
  kProxyCtrl = 1 << 5,
  kKernelCh = 1 << 6,
  kNetPlugin = 1 << 7,
  kGroupApi = 1 << 8,
  kCollApi = 1 << 9,
  kP2pApi = 1 << 10,
  kKernelLaunch = 1 << 11,
  kCeColl = 1 << 12,
  kCeSync = 1 << 13,
  kCeBatch = 1 << 14,
};
inline constexpr int kKernelChStop = 22;  // the only state that MoECCL records

struct GroupApi {
  bool graphCaptured;
  int groupDepth;  // 1: the call itself
};
struct CollApi {
  const char* func;
  size_t count;
  const char* datatype;
  int root;
  void* stream;
  bool graphCaptured;
};
struct P2pApi {
  const char* func;
  size_t count;
  const char* datatype;
  void* stream;
  bool graphCaptured;
};
struct Coll {
  uint64_t seqNumber;
  const char* func;
  const void* sendBuff;
  void* recvBuff;
  size_t count;
  int root;
  const char* datatype;
  uint8_t nChannels;
  uint8_t nWarps;
  const char* algo;
  const char* proto;
  void* parentGroup;  // since v5
};
struct P2p {
  const char* func;
  void* buff;
  const char* datatype;
  size_t count;
  int peer;
  uint8_t nChannels;
  void* parentGroup;  // since v5
};
struct KernelCh {
  uint8_t channelId;
  uint64_t pTimer;  // ns
};

// v4 to v6. The type of v4 is one byte, which is the first one of this; its Coll and P2p end before parentGroup.
static_assert(std::endian::native == std::endian::little);
struct Descriptor {
  uint64_t type;
  void* parentObj;
  int rank;
  union {
    GroupApi groupApi;
    CollApi collApi;
    P2pApi p2pApi;
    Coll coll;
    P2p p2p;
    KernelCh kernelCh;
    uint64_t room[11];  // of the largest member, an event of v6 that MoECCL does not have
  };
};

struct OldColl2 {
  const char* name;
  uint64_t commHash;
  uint64_t seqNumber;
  const char* func;
  const void* sendBuff;
  void* recvBuff;
  size_t count;
  int root;
  const char* datatype;
  size_t trafficBytes;
  uint8_t nMaxChannels;
  uint8_t nWarps;
  const char* algo;
  const char* proto;
};
struct OldColl3 {
  const char* name;
  uint64_t commHash;
  uint64_t seqNumber;
  const char* func;
  const void* sendBuff;
  void* recvBuff;
  size_t count;
  int root;
  const char* datatype;
  uint8_t nMaxChannels;
  uint8_t nWarps;
  const char* algo;
  const char* proto;
};
struct OldP2p {
  const char* name;
  uint64_t commHash;
  const char* func;
  void* buff;
  const char* datatype;
  size_t count;
  int peer;
};
// v2 and v3
struct OldDescriptor {
  uint8_t type;
  void* parentObj;
  int rank;
  union {
    OldColl2 coll2;
    OldColl3 coll3;
    OldP2p p2p;
  };
};

// What comes with kKernelChStop.
struct KernelChArgs {
  uint64_t pTimer;
};

using Init2 = Code (*)(void** context, int* mask);
using Init4 = Code (*)(void** context, int* mask, const char* name, uint64_t hash, int nNodes, int nRanks, int rank,
                       Logger log);
using Init5 = Code (*)(void** context, uint64_t id, int* mask, const char* name, int nNodes, int nRanks, int rank,
                       Logger log);

// The structure of every version: only init differs.
struct Plugin {
  const char* name;
  void (*init)();  // an Init2 (v2, v3), Init4 (v4) or Init5 (v5, v6)
  Code (*startEvent)(void* context, void** event, void* descriptor);
  Code (*stopEvent)(void* event);
  Code (*recordEventState)(void* event, int state, void* args);
  Code (*finalize)(void* context);
};

}  // namespace moeccl::profiler::abi
