// SPDX-License-Identifier: Apache-2.0
// The binary interface of NCCL's net plugins, versions 6 to 12, as a host needs it: our own declarations of what a
// plugin exports as `ncclNetPlugin_v6` .. `ncclNetPlugin_v12`. The layouts are facts
// (tests/unit/transport/netplugin_abi_test.cc pins each offset).
//
// Changes: v7 asks for offload to the device (a pointer that stays null here); v8 registers with size_t; v9 transfers
// with size_t and reports limits and virtual devices; v10 adds a profiler callback, a traffic class at connect and a
// handle for each transfer; v11 gives every communicator a context, and adds finalize; v12 widens the list of devices
// behind a virtual one and reports rail and plane.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moeccl::transport::netplugin::abi {

inline constexpr int kOldest = 6, kNewest = 12;
inline constexpr size_t kHandleBytes = 128;
inline constexpr int kPtrHost = 1, kPtrCuda = 2, kPtrDmabuf = 4;
inline constexpr int kUndefined = -1;  // traffic class, rail, plane
inline constexpr int kDeviceHost = 0;  // netDeviceType: the host drives the transfers

// ncclResult_t. Plugins are C, so any number may come.
using Code = int;
inline constexpr Code kSuccess = 0, kSystemError = 2, kInternalError = 3;

// ncclDebugLogger_t; levels 2 WARN, 3 INFO, 5 TRACE.
using Logger = void (*)(int level, unsigned long flags, const char* file, int line, const char* text, ...);
// ncclProfilerCallback_t
using Profiler = Code (*)(void** event, int type, void* parent, int64_t plugin_id, void* data);

struct CommConfig {
  int trafficClass;
};

struct VDeviceProps4 {
  int ndevs;
  int devs[4];
};
struct VDeviceProps8 {
  int ndevs;
  int devs[8];
};

struct PropertiesV6 {
  char* name;
  char* pciPath;
  uint64_t guid;
  int ptrSupport;
  int speed;  // Mbit/s
  int port;
  float latency;  // us; 0: not reported
  int maxComms;
  int maxRecvs;
};
struct PropertiesV7 {
  char* name;
  char* pciPath;
  uint64_t guid;
  int ptrSupport;
  int speed;
  int port;
  float latency;
  int maxComms;
  int maxRecvs;
  int netDeviceType;
  int netDeviceVersion;
};
struct PropertiesV8 {
  char* name;
  char* pciPath;
  uint64_t guid;
  int ptrSupport;
  int regIsGlobal;
  int speed;
  int port;
  float latency;
  int maxComms;
  int maxRecvs;
  int netDeviceType;
  int netDeviceVersion;
};
struct PropertiesV9 {
  char* name;
  char* pciPath;
  uint64_t guid;
  int ptrSupport;
  int regIsGlobal;
  int forceFlush;
  int speed;
  int port;
  float latency;
  int maxComms;
  int maxRecvs;
  int netDeviceType;
  int netDeviceVersion;
  VDeviceProps4 vProps;
  size_t maxP2pBytes;
  size_t maxCollBytes;
};
using PropertiesV10 = PropertiesV9;
struct PropertiesV11 {
  char* name;
  char* pciPath;
  uint64_t guid;
  int ptrSupport;
  int regIsGlobal;
  int forceFlush;
  int speed;
  int port;
  float latency;
  int maxComms;
  int maxRecvs;
  int netDeviceType;
  int netDeviceVersion;
  VDeviceProps4 vProps;
  size_t maxP2pBytes;
  size_t maxCollBytes;
  int maxMultiRequestSize;
};
struct PropertiesV12 {
  char* name;
  char* pciPath;
  uint64_t guid;
  int ptrSupport;
  int regIsGlobal;
  int forceFlush;
  int speed;
  int port;
  float latency;
  int maxComms;
  int maxRecvs;
  int netDeviceType;
  int netDeviceVersion;
  VDeviceProps8 vProps;
  size_t maxP2pBytes;
  size_t maxCollBytes;
  int maxMultiRequestSize;
  int16_t railId;
  int16_t planeId;
};

// What all versions have in common.
using Devices = Code(int* n);
template <class P>
using GetProperties = Code(int dev, P* props);
using RegMrDmaBuf = Code(void* comm, void* data, size_t size, int type, uint64_t offset, int fd, void** mhandle);
using DeregMr = Code(void* comm, void* mhandle);
using Iflush = Code(void* recv_comm, int n, void** data, int* sizes, void** mhandles, void** request);
using Test = Code(void* request, int* done, int* sizes);
using Close = Code(void* comm);
using GetDeviceMr = Code(void* comm, void* mhandle, void** device_mhandle);
using IrecvConsumed = Code(void* recv_comm, int n, void* request);

// What each version changes in the one before it.
struct TypesV6 {
  using Properties = PropertiesV6;
  using Init = Code(Logger);
  using Listen = Code(int dev, void* handle, void** listen_comm);
  using Connect = Code(int dev, void* handle, void** send_comm);
  using Accept = Code(void* listen_comm, void** recv_comm);
  using RegMr = Code(void* comm, void* data, int size, int type, void** mhandle);
  using Isend = Code(void* send_comm, void* data, int size, int tag, void* mhandle, void** request);
  using Irecv = Code(void* recv_comm, int n, void** data, int* sizes, int* tags, void** mhandles, void** request);
};
struct TypesV7 : TypesV6 {
  using Properties = PropertiesV7;
  using Connect = Code(int dev, void* handle, void** send_comm, void** send_dev_comm);
  using Accept = Code(void* listen_comm, void** recv_comm, void** recv_dev_comm);
};
struct TypesV8 : TypesV7 {
  using Properties = PropertiesV8;
  using RegMr = Code(void* comm, void* data, size_t size, int type, void** mhandle);
};
struct TypesV9 : TypesV8 {
  using Properties = PropertiesV9;
  using VDeviceProps = VDeviceProps4;
  using Isend = Code(void* send_comm, void* data, size_t size, int tag, void* mhandle, void** request);
  using Irecv = Code(void* recv_comm, int n, void** data, size_t* sizes, int* tags, void** mhandles, void** request);
};
struct TypesV10 : TypesV9 {
  using Properties = PropertiesV10;
  using Init = Code(Logger, Profiler);
  using Connect = Code(int dev, CommConfig* config, void* handle, void** send_comm, void** send_dev_comm);
  using Isend = Code(void* send_comm, void* data, size_t size, int tag, void* mhandle, void* phandle, void** request);
  using Irecv = Code(void* recv_comm, int n, void** data, size_t* sizes, int* tags, void** mhandles, void** phandles,
                     void** request);
};
struct TypesV11 : TypesV10 {  // from here on each communicator has a context
  using Properties = PropertiesV11;
  using Init = Code(void** context, uint64_t comm_id, CommConfig* config, Logger, Profiler);
  using Listen = Code(void* context, int dev, void* handle, void** listen_comm);
  using Connect = Code(void* context, int dev, void* handle, void** send_comm, void** send_dev_comm);
};
struct TypesV12 : TypesV11 {
  using Properties = PropertiesV12;
  using VDeviceProps = VDeviceProps8;
};

// The functions of a version. Later versions have more of them at the end.
template <class Types>
struct Calls6 {
  const char* name;
  typename Types::Init* init;
  // The number of adapters. If it is 0, everything below may be null, but finalize is still called.
  Devices* devices;
  GetProperties<typename Types::Properties>* getProperties;
  // Writes kHandleBytes into `handle`, which the peer passes to connect().
  typename Types::Listen* listen;
  // Neither may wait: success with a null comm means "call again", with the same handle, in which connect keeps its
  // state.
  typename Types::Connect* connect;
  typename Types::Accept* accept;
  typename Types::RegMr* regMr;
  RegMrDmaBuf* regMrDmaBuf;
  DeregMr* deregMr;
  // A null request means "not now, call again". The n-th send of a comm goes into the n-th receive of its peer.
  typename Types::Isend* isend;
  typename Types::Irecv* irecv;
  // After a receive into CUDA memory: once this request is done, the device sees the bytes.
  Iflush* iflush;
  // Moves bytes, too. A request that is done must not be passed again.
  Test* test;
  // NCCL closes no comm that has requests under way, and not every plugin survives that.
  Close* closeSend;
  Close* closeRecv;
  Close* closeListen;
};
template <class Types>
struct Calls7 : Calls6<Types> {
  GetDeviceMr* getDeviceMr;
  IrecvConsumed* irecvConsumed;
};
template <class Types>
struct Calls9 : Calls7<Types> {
  Code (*makeVDevice)(int* dev, typename Types::VDeviceProps* props);
};
template <class Types>
struct Calls11 : Calls9<Types> {
  Code (*finalize)(void* context);
  Code (*setNetAttr)(void* context, void* attributes);
};
using NetV6 = Calls6<TypesV6>;
using NetV7 = Calls7<TypesV7>;
using NetV8 = Calls7<TypesV8>;
using NetV9 = Calls9<TypesV9>;
using NetV10 = Calls9<TypesV10>;
using NetV11 = Calls11<TypesV11>;
using NetV12 = Calls11<TypesV12>;

}  // namespace moeccl::transport::netplugin::abi
