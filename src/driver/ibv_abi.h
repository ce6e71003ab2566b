// SPDX-License-Identifier: Apache-2.0
// The structures of libibverbs (ABI 1.1) that the probe and transport/verbs use. They are declared here so that no
// header of rdma-core is needed to build. tests/unit/driver/ibv_abi_test.cc compares them with those headers where they
// are installed, and tests/support/fake_hardware/fake_ibverbs*.cc are built against them too.
#pragma once

#include <pthread.h>

#include <cstdint>

namespace moeccl::driver::ibv_abi {

struct Context;
struct CompletionQueue;
struct QueuePair;
struct SendRequest;
struct ReceiveRequest;
struct Completion;

struct Device {
  void* ops[2];
  int node_type;
  int transport_type;
  char name[64];
  char dev_name[64];
  char dev_path[256];
  char ibdev_path[256];  // "/sys/class/infiniband/mlx5_0"
};
struct DeviceAttr {
  char fw_ver[64];
  uint64_t node_guid, sys_image_guid, max_mr_size, page_size_cap;
  uint32_t vendor_id, vendor_part_id, hw_ver;
  int max_qp, max_qp_wr;
  unsigned device_cap_flags;
  int max_sge, max_sge_rd, max_cq, max_cqe, max_mr, max_pd;
  int max_qp_rd_atom, max_ee_rd_atom, max_res_rd_atom, max_qp_init_rd_atom, max_ee_init_rd_atom, atomic_cap;
  int max_ee, max_rdd, max_mw, max_raw_ipv6_qp, max_raw_ethy_qp, max_mcast_grp, max_mcast_qp_attach;
  int max_total_mcast_qp_attach, max_ah, max_fmr, max_map_per_fmr, max_srq, max_srq_wr, max_srq_sge;
  uint16_t max_pkeys;
  uint8_t local_ca_ack_delay, phys_port_cnt;
};
// The exported ibv_query_port fills the fields up to `flags`.
struct PortAttr {
  int state, max_mtu, active_mtu;
  int gid_tbl_len;
  uint32_t port_cap_flags, max_msg_sz, bad_pkey_cntr, qkey_viol_cntr;
  uint16_t pkey_tbl_len, lid, sm_lid;
  uint8_t lmc, max_vl_num, sm_sl, subnet_timeout, init_type_reply, active_width, active_speed, phys_state;
  uint8_t link_layer, flags;
  uint16_t port_cap_flags2;
  uint32_t spare[8];  // room for fields that newer versions append
};

// The calls of the data path are not exported. A provider stores them here when it opens the device.
struct ContextOps {
  void* before_poll_cq[11];
  int (*poll_cq)(CompletionQueue*, int n, Completion*);
  void* before_post_send[13];
  int (*post_send)(QueuePair*, SendRequest*, SendRequest** bad);
  int (*post_recv)(QueuePair*, ReceiveRequest*, ReceiveRequest** bad);
  void* rest[5];
};
struct Context {
  Device* device;
  ContextOps ops;
  int cmd_fd;
  int async_fd;
  int num_comp_vectors;
  pthread_mutex_t mutex;
  void* abi_compat;
};
struct ProtectionDomain {
  Context* context;
  uint32_t handle;
};
struct MemoryRegion {
  Context* context;
  ProtectionDomain* pd;
  void* addr;
  size_t length;
  uint32_t handle, lkey, rkey;
};
struct CompletionQueue {
  Context* context;
  void* channel;
  void* cq_context;
  uint32_t handle;
  int cqe;
  pthread_mutex_t mutex;
  pthread_cond_t cond;
  uint32_t comp_events_completed, async_events_completed;
};
struct QueuePair {
  Context* context;
  void* qp_context;
  ProtectionDomain* pd;
  CompletionQueue* send_cq;
  CompletionQueue* recv_cq;
  void* srq;
  uint32_t handle, qp_num;
  int state, qp_type;
  pthread_mutex_t mutex;
  pthread_cond_t cond;
  uint32_t events_completed;
};
struct QueueCap {
  uint32_t max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data;
};
struct QueuePairInit {
  void* qp_context;
  CompletionQueue* send_cq;
  CompletionQueue* recv_cq;
  void* srq;
  QueueCap cap;
  int qp_type, sq_sig_all;
};
union Gid {
  uint8_t raw[16];
  struct {
    uint64_t subnet_prefix, interface_id;  // big-endian
  } global;
};
struct GlobalRoute {
  Gid dgid;
  uint32_t flow_label;
  uint8_t sgid_index, hop_limit, traffic_class;
};
struct AddressVector {
  GlobalRoute grh;
  uint16_t dlid;
  uint8_t sl, src_path_bits, static_rate, is_global, port_num;
};
struct QueuePairAttr {
  int qp_state, cur_qp_state, path_mtu, path_mig_state;
  uint32_t qkey, rq_psn, sq_psn, dest_qp_num;
  unsigned qp_access_flags;
  QueueCap cap;
  AddressVector ah_attr, alt_ah_attr;
  uint16_t pkey_index, alt_pkey_index;
  uint8_t en_sqd_async_notify, sq_draining, max_rd_atomic, max_dest_rd_atomic, min_rnr_timer, port_num, timeout;
  uint8_t retry_cnt, rnr_retry, alt_port_num, alt_timeout;
  uint32_t rate_limit;
};
struct Piece {
  uint64_t addr;
  uint32_t length, lkey;
};
struct SendRequest {
  uint64_t wr_id;
  SendRequest* next;
  Piece* sg_list;
  int num_sge;
  int opcode;
  unsigned send_flags;
  uint32_t imm_data;
  union {
    struct {
      uint64_t remote_addr;
      uint32_t rkey;
    } rdma;
    struct {
      uint64_t remote_addr, compare_add, swap;
      uint32_t rkey;
    } atomic;
  } wr;
  uint32_t remote_srqn;
  union {
    struct {
      void* mw;
      uint32_t rkey;
      struct {
        void* mr;
        uint64_t addr, length;
        unsigned access;
      } info;
    } bind_mw;
    struct {
      void* hdr;
      uint16_t hdr_sz, mss;
    } tso;
  } tail;
};
struct ReceiveRequest {
  uint64_t wr_id;
  ReceiveRequest* next;
  Piece* sg_list;
  int num_sge;
};
struct Completion {
  uint64_t wr_id;
  int status, opcode;
  uint32_t vendor_err, byte_len, imm_data, qp_num, src_qp;
  unsigned wc_flags;
  uint16_t pkey_index, slid;
  uint8_t sl, dlid_path_bits;
};
struct GidEntry {
  Gid gid;
  uint32_t gid_index, port_num, gid_type, ndev_ifindex;
};
struct AsyncEvent {
  union {
    CompletionQueue* cq;
    QueuePair* qp;
    void* other;
    int port_num;
  } element;
  int event_type;
};

inline constexpr int kPortActive = 4;
inline constexpr uint8_t kLayerInfiniband = 1, kLayerEthernet = 2;
inline constexpr uint8_t kPortNeedsGrh = 1;  // PortAttr::flags
inline constexpr uint32_t kGidInfiniband = 0, kGidRoceV1 = 1, kGidRoceV2 = 2;
inline constexpr int kReliable = 2;  // qp_type
inline constexpr int kStateReset = 0, kStateInit = 1, kStateReceive = 2, kStateSend = 3, kStateError = 6;
inline constexpr int kRdmaWrite = 0, kRdmaRead = 4;  // opcodes of requests
inline constexpr unsigned kSendFence = 1, kSendSignaled = 2, kSendInline = 8;
inline constexpr unsigned kLocalWrite = 1, kRemoteWrite = 2, kRemoteRead = 4, kRelaxedOrdering = 1u << 20;

// Bits for the fields that modify_qp changes.
inline constexpr int kMaskState = 1, kMaskAccess = 1 << 3, kMaskPkey = 1 << 4, kMaskPort = 1 << 5,
                     kMaskAddress = 1 << 7, kMaskMtu = 1 << 8, kMaskTimeout = 1 << 9, kMaskRetry = 1 << 10,
                     kMaskRnrRetry = 1 << 11, kMaskRqPsn = 1 << 12, kMaskReads = 1 << 13, kMaskRnrTimer = 1 << 15,
                     kMaskSqPsn = 1 << 16, kMaskDestReads = 1 << 17, kMaskDestination = 1 << 20;

// Completion::status.
inline constexpr int kSuccess = 0, kLocalProtection = 4, kFlushed = 5, kRemoteInvalid = 9, kRemoteAccess = 10,
                     kRemoteOperation = 11, kRetryExceeded = 12, kRnrExceeded = 13;
// AsyncEvent::event_type.
inline constexpr int kEventQueueError = 0, kEventPairFatal = 1, kEventPairRequest = 2, kEventPairAccess = 3,
                     kEventDeviceFatal = 8, kEventPortActive = 9, kEventPortError = 10, kEventLidChange = 11,
                     kEventGidChange = 18;

}  // namespace moeccl::driver::ibv_abi
