// The few structures of libibverbs (ABI 1.1) that the probe reads, declared here so that no header of rdma-core is
// needed to build. tests/support/fake_hardware/fake_ibverbs.cc is built against them too.
#pragma once

#include <cstdint>

namespace moeccl::driver::ibv_abi {

struct Context;
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
// The exported ibv_query_port fills it up to `flags`.
struct PortAttr {
  int state, max_mtu, active_mtu;
  int gid_tbl_len;
  uint32_t port_cap_flags, max_msg_sz, bad_pkey_cntr, qkey_viol_cntr;
  uint16_t pkey_tbl_len, lid, sm_lid;
  uint8_t lmc, max_vl_num, sm_sl, subnet_timeout, init_type_reply, active_width, active_speed, phys_state;
  uint8_t link_layer, flags;
  uint16_t port_cap_flags2;
  uint32_t spare[8];  // newer versions append
};

inline constexpr int kPortActive = 4;
inline constexpr uint8_t kLayerInfiniband = 1, kLayerEthernet = 2;

}  // namespace moeccl::driver::ibv_abi
