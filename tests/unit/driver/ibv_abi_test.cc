// SPDX-License-Identifier: Apache-2.0
// The structures that src/driver/ibv_abi.h redeclares, compared with rdma-core's headers where they are installed.
#include <gtest/gtest.h>

#if __has_include(<infiniband/verbs.h>)
#include <infiniband/verbs.h>

#include "src/driver/ibv_abi.h"

namespace own = moeccl::driver::ibv_abi;

#define SAME_SIZE(theirs, ours) static_assert(sizeof(theirs) == sizeof(own::ours))
#define SAME_PLACE(theirs, field, ours, own_field) \
  static_assert(offsetof(theirs, field) == offsetof(own::ours, own_field))

SAME_SIZE(ibv_context_ops, ContextOps);
SAME_PLACE(ibv_context_ops, poll_cq, ContextOps, poll_cq);
SAME_PLACE(ibv_context_ops, post_send, ContextOps, post_send);
SAME_PLACE(ibv_context_ops, post_recv, ContextOps, post_recv);
SAME_SIZE(ibv_context, Context);
SAME_PLACE(ibv_context, ops, Context, ops);
SAME_PLACE(ibv_context, async_fd, Context, async_fd);
SAME_SIZE(ibv_pd, ProtectionDomain);
SAME_SIZE(ibv_mr, MemoryRegion);
SAME_PLACE(ibv_mr, lkey, MemoryRegion, lkey);
SAME_PLACE(ibv_mr, rkey, MemoryRegion, rkey);
SAME_SIZE(ibv_cq, CompletionQueue);
SAME_PLACE(ibv_cq, cqe, CompletionQueue, cqe);
SAME_SIZE(ibv_qp, QueuePair);
SAME_PLACE(ibv_qp, qp_num, QueuePair, qp_num);
SAME_PLACE(ibv_qp, state, QueuePair, state);
SAME_SIZE(ibv_qp_init_attr, QueuePairInit);
SAME_PLACE(ibv_qp_init_attr, cap, QueuePairInit, cap);
SAME_PLACE(ibv_qp_init_attr, sq_sig_all, QueuePairInit, sq_sig_all);
SAME_PLACE(ibv_qp_cap, max_inline_data, QueueCap, max_inline_data);
SAME_SIZE(ibv_ah_attr, AddressVector);
SAME_PLACE(ibv_ah_attr, dlid, AddressVector, dlid);
SAME_PLACE(ibv_ah_attr, is_global, AddressVector, is_global);
SAME_PLACE(ibv_ah_attr, port_num, AddressVector, port_num);
SAME_PLACE(ibv_global_route, sgid_index, GlobalRoute, sgid_index);
SAME_PLACE(ibv_global_route, traffic_class, GlobalRoute, traffic_class);
SAME_SIZE(ibv_qp_attr, QueuePairAttr);
SAME_PLACE(ibv_qp_attr, qp_access_flags, QueuePairAttr, qp_access_flags);
SAME_PLACE(ibv_qp_attr, ah_attr, QueuePairAttr, ah_attr);
SAME_PLACE(ibv_qp_attr, pkey_index, QueuePairAttr, pkey_index);
SAME_PLACE(ibv_qp_attr, port_num, QueuePairAttr, port_num);
SAME_PLACE(ibv_qp_attr, rnr_retry, QueuePairAttr, rnr_retry);
SAME_SIZE(ibv_sge, Piece);
SAME_SIZE(ibv_send_wr, SendRequest);
SAME_PLACE(ibv_send_wr, opcode, SendRequest, opcode);
SAME_PLACE(ibv_send_wr, send_flags, SendRequest, send_flags);
SAME_PLACE(ibv_send_wr, wr.rdma.rkey, SendRequest, wr.rdma.rkey);
SAME_PLACE(ibv_send_wr, qp_type, SendRequest, remote_srqn);
SAME_SIZE(ibv_recv_wr, ReceiveRequest);
SAME_SIZE(ibv_wc, Completion);
SAME_PLACE(ibv_wc, vendor_err, Completion, vendor_err);
SAME_PLACE(ibv_wc, qp_num, Completion, qp_num);
SAME_SIZE(ibv_gid_entry, GidEntry);
SAME_PLACE(ibv_gid_entry, gid_type, GidEntry, gid_type);
SAME_SIZE(ibv_async_event, AsyncEvent);
SAME_PLACE(ibv_async_event, event_type, AsyncEvent, event_type);

static_assert(IBV_PORT_ACTIVE == own::kPortActive && IBV_QPF_GRH_REQUIRED == own::kPortNeedsGrh);
static_assert(IBV_QPT_RC == own::kReliable);
static_assert(IBV_QPS_INIT == own::kStateInit && IBV_QPS_RTR == own::kStateReceive && IBV_QPS_RTS == own::kStateSend &&
              IBV_QPS_ERR == own::kStateError);
static_assert(IBV_WR_RDMA_WRITE == own::kRdmaWrite && IBV_WR_RDMA_READ == own::kRdmaRead);
static_assert(IBV_SEND_FENCE == own::kSendFence && IBV_SEND_SIGNALED == own::kSendSignaled &&
              IBV_SEND_INLINE == own::kSendInline);
static_assert(IBV_ACCESS_LOCAL_WRITE == own::kLocalWrite && IBV_ACCESS_REMOTE_WRITE == own::kRemoteWrite &&
              IBV_ACCESS_REMOTE_READ == own::kRemoteRead && IBV_ACCESS_RELAXED_ORDERING == own::kRelaxedOrdering);
static_assert(IBV_QP_ACCESS_FLAGS == own::kMaskAccess && IBV_QP_PKEY_INDEX == own::kMaskPkey &&
              IBV_QP_PORT == own::kMaskPort && IBV_QP_AV == own::kMaskAddress && IBV_QP_PATH_MTU == own::kMaskMtu &&
              IBV_QP_TIMEOUT == own::kMaskTimeout && IBV_QP_RETRY_CNT == own::kMaskRetry &&
              IBV_QP_RNR_RETRY == own::kMaskRnrRetry && IBV_QP_RQ_PSN == own::kMaskRqPsn &&
              IBV_QP_MAX_QP_RD_ATOMIC == own::kMaskReads && IBV_QP_MIN_RNR_TIMER == own::kMaskRnrTimer &&
              IBV_QP_SQ_PSN == own::kMaskSqPsn && IBV_QP_MAX_DEST_RD_ATOMIC == own::kMaskDestReads &&
              IBV_QP_DEST_QPN == own::kMaskDestination);
static_assert(IBV_WC_LOC_PROT_ERR == own::kLocalProtection && IBV_WC_WR_FLUSH_ERR == own::kFlushed &&
              IBV_WC_REM_INV_REQ_ERR == own::kRemoteInvalid && IBV_WC_REM_ACCESS_ERR == own::kRemoteAccess &&
              IBV_WC_REM_OP_ERR == own::kRemoteOperation && IBV_WC_RETRY_EXC_ERR == own::kRetryExceeded &&
              IBV_WC_RNR_RETRY_EXC_ERR == own::kRnrExceeded);
static_assert(IBV_EVENT_CQ_ERR == own::kEventQueueError && IBV_EVENT_QP_FATAL == own::kEventPairFatal &&
              IBV_EVENT_QP_REQ_ERR == own::kEventPairRequest && IBV_EVENT_QP_ACCESS_ERR == own::kEventPairAccess &&
              IBV_EVENT_DEVICE_FATAL == own::kEventDeviceFatal && IBV_EVENT_PORT_ACTIVE == own::kEventPortActive &&
              IBV_EVENT_PORT_ERR == own::kEventPortError && IBV_EVENT_LID_CHANGE == own::kEventLidChange &&
              IBV_EVENT_GID_CHANGE == own::kEventGidChange);

TEST(IbvAbi, IsThatOfTheInstalledHeaders) { SUCCEED() << "compared when this was compiled"; }
#else
TEST(IbvAbi, IsThatOfTheInstalledHeaders) { GTEST_SKIP() << "libibverbs-dev is not installed"; }
#endif
