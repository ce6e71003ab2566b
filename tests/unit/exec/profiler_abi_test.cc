// SPDX-License-Identifier: Apache-2.0
// The layouts of NCCL's profiler plugins, as NCCL's headers have them (2.30.7, read on 29 November 2026).
#include <gtest/gtest.h>

#include "src/profiler/abi.h"

namespace moeccl::profiler::abi {
namespace {

#define AT(type, member, offset) EXPECT_EQ(offsetof(type, member), size_t{offset}) << #type "." #member

TEST(ProfilerAbi, HasNcclsOffsets) {
  EXPECT_EQ(sizeof(Descriptor), 112u);
  AT(Descriptor, parentObj, 8);
  AT(Descriptor, rank, 16);
  AT(Descriptor, groupApi.groupDepth, 28);
  AT(Descriptor, collApi.count, 32);
  AT(Descriptor, collApi.datatype, 40);
  AT(Descriptor, collApi.root, 48);
  AT(Descriptor, collApi.stream, 56);
  AT(Descriptor, collApi.graphCaptured, 64);
  AT(Descriptor, p2pApi.datatype, 40);
  AT(Descriptor, p2pApi.stream, 48);
  AT(Descriptor, p2pApi.graphCaptured, 56);
  AT(Descriptor, coll.seqNumber, 24);
  AT(Descriptor, coll.func, 32);
  AT(Descriptor, coll.sendBuff, 40);
  AT(Descriptor, coll.recvBuff, 48);
  AT(Descriptor, coll.count, 56);
  AT(Descriptor, coll.root, 64);
  AT(Descriptor, coll.datatype, 72);
  AT(Descriptor, coll.nChannels, 80);
  AT(Descriptor, coll.nWarps, 81);
  AT(Descriptor, coll.algo, 88);
  AT(Descriptor, coll.proto, 96);
  AT(Descriptor, coll.parentGroup, 104);
  AT(Descriptor, p2p.func, 24);
  AT(Descriptor, p2p.buff, 32);
  AT(Descriptor, p2p.datatype, 40);
  AT(Descriptor, p2p.count, 48);
  AT(Descriptor, p2p.peer, 56);
  AT(Descriptor, p2p.nChannels, 60);
  AT(Descriptor, p2p.parentGroup, 64);
  AT(Descriptor, kernelCh.channelId, 24);
  AT(Descriptor, kernelCh.pTimer, 32);
}

TEST(ProfilerAbi, HasTheOffsetsOfOldVersions) {
  AT(OldDescriptor, parentObj, 8);
  AT(OldDescriptor, rank, 16);
  AT(OldDescriptor, coll2.commHash, 32);
  AT(OldDescriptor, coll2.seqNumber, 40);
  AT(OldDescriptor, coll2.func, 48);
  AT(OldDescriptor, coll2.count, 72);
  AT(OldDescriptor, coll2.datatype, 88);
  AT(OldDescriptor, coll2.trafficBytes, 96);
  AT(OldDescriptor, coll2.nMaxChannels, 104);
  AT(OldDescriptor, coll2.algo, 112);
  AT(OldDescriptor, coll2.proto, 120);
  AT(OldDescriptor, coll3.nMaxChannels, 96);
  AT(OldDescriptor, coll3.nWarps, 97);
  AT(OldDescriptor, coll3.algo, 104);
  AT(OldDescriptor, coll3.proto, 112);
  AT(OldDescriptor, p2p.func, 40);
  AT(OldDescriptor, p2p.buff, 48);
  AT(OldDescriptor, p2p.datatype, 56);
  AT(OldDescriptor, p2p.count, 64);
  AT(OldDescriptor, p2p.peer, 72);
  EXPECT_EQ(sizeof(Plugin), 48u);
}

}  // namespace
}  // namespace moeccl::profiler::abi
