// SPDX-License-Identifier: Apache-2.0
// The layouts of NCCL's net plugins in its headers of 2.12 to 2.32, which must not change.
#include <gtest/gtest.h>

#include "transport/netplugin/abi.h"

// Later versions derive from earlier ones, for which offsetof is only conditionally supported.
#pragma GCC diagnostic ignored "-Winvalid-offsetof"

namespace moeccl::transport::netplugin::abi {
namespace {

#define AT(type, field, offset) static_assert(offsetof(type, field) == (offset))

AT(PropertiesV6, guid, 16);
AT(PropertiesV6, ptrSupport, 24);
AT(PropertiesV6, speed, 28);
AT(PropertiesV6, latency, 36);
AT(PropertiesV6, maxComms, 40);
AT(PropertiesV6, maxRecvs, 44);
static_assert(sizeof(PropertiesV6) == 48);
AT(PropertiesV7, speed, 28);
AT(PropertiesV7, netDeviceType, 48);
static_assert(sizeof(PropertiesV7) == 56);
AT(PropertiesV8, regIsGlobal, 28);
AT(PropertiesV8, speed, 32);
AT(PropertiesV8, netDeviceType, 52);
static_assert(sizeof(PropertiesV8) == 64);
AT(PropertiesV9, forceFlush, 32);
AT(PropertiesV9, speed, 36);
AT(PropertiesV9, netDeviceType, 56);
AT(PropertiesV9, vProps, 64);
AT(PropertiesV9, maxP2pBytes, 88);
AT(PropertiesV9, maxCollBytes, 96);
static_assert(sizeof(PropertiesV9) == 104 && sizeof(PropertiesV10) == 104);
AT(PropertiesV11, maxP2pBytes, 88);
AT(PropertiesV11, maxMultiRequestSize, 104);
static_assert(sizeof(PropertiesV11) == 112);
AT(PropertiesV12, vProps, 64);
AT(PropertiesV12, maxP2pBytes, 104);
AT(PropertiesV12, maxMultiRequestSize, 120);
AT(PropertiesV12, railId, 124);
AT(PropertiesV12, planeId, 126);
static_assert(sizeof(PropertiesV12) == 128);
static_assert(sizeof(VDeviceProps4) == 20 && sizeof(VDeviceProps8) == 36 && sizeof(CommConfig) == 4);

// The name comes first, then functions in a fixed order. Later versions add some at the end.
template <class Net>
constexpr bool in_order() {
  return offsetof(Net, name) == 0 && offsetof(Net, init) == 8 && offsetof(Net, devices) == 16 &&
         offsetof(Net, getProperties) == 24 && offsetof(Net, listen) == 32 && offsetof(Net, connect) == 40 &&
         offsetof(Net, accept) == 48 && offsetof(Net, regMr) == 56 && offsetof(Net, regMrDmaBuf) == 64 &&
         offsetof(Net, deregMr) == 72 && offsetof(Net, isend) == 80 && offsetof(Net, irecv) == 88 &&
         offsetof(Net, iflush) == 96 && offsetof(Net, test) == 104 && offsetof(Net, closeSend) == 112 &&
         offsetof(Net, closeRecv) == 120 && offsetof(Net, closeListen) == 128;
}
static_assert(in_order<NetV6>() && sizeof(NetV6) == 17 * 8);
static_assert(in_order<NetV7>() && sizeof(NetV7) == 19 * 8);
static_assert(in_order<NetV8>() && sizeof(NetV8) == 19 * 8);
static_assert(in_order<NetV9>() && sizeof(NetV9) == 20 * 8);
static_assert(in_order<NetV10>() && sizeof(NetV10) == 20 * 8);
static_assert(in_order<NetV11>() && sizeof(NetV11) == 22 * 8);
static_assert(in_order<NetV12>() && sizeof(NetV12) == 22 * 8);
AT(NetV7, getDeviceMr, 136);
AT(NetV7, irecvConsumed, 144);
AT(NetV9, makeVDevice, 152);
AT(NetV11, finalize, 160);
AT(NetV12, finalize, 160);
AT(NetV12, setNetAttr, 168);
#undef AT

TEST(NetPluginAbi, IsWhatNcclsHeadersHave) { SUCCEED() << "checked when this file compiles"; }

}  // namespace
}  // namespace moeccl::transport::netplugin::abi
