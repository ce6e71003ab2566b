// SPDX-License-Identifier: Apache-2.0
// Every MOECCL_ variable of the environment, read once. A new one needs a field here and a row of the table in env.cc.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "src/base/status.h"

namespace moeccl {

enum class LogLevel : uint8_t { kError, kWarn, kInfo, kTrace };

// TCP ports from `first` to `last`; all that are free if it is not given.
struct PortRange {
  uint16_t first = 0, last = 0;
  bool given() const { return first != 0; }
};

struct Env {
  // MOECCL_TIMEOUT_MS: milliseconds after which a waiting operation fails. 1 .. 2147483647.
  int64_t timeout_ms = 600'000;
  // MOECCL_INIT_TIMEOUT_MS: milliseconds after which init or split fails because a rank is missing.
  int64_t init_timeout_ms = 60'000;
  // MOECCL_STAGING_BYTES: cap on a rank's staging memory in a communicator. Accepts K, M, G (powers of 1024). The same
  // on all ranks. 0: 1M for each host of the communicator, and at least 16M; on a long line up to 256M, as far as the
  // ranks' hosts have room (docs/guides/tuning.md, Long lines).
  int64_t staging_bytes = 0;
  // MOECCL_HEAP_BYTES: size of the address range of this process's symmetric heap (moecclMemAlloc), which every process
  // of the host maps; memory is used only where something is allocated. Accepts K, M, G. 0: the machine's memory size,
  // or a sixteenth of the range that an address limit (ulimit -v) leaves.
  int64_t heap_bytes = 0;
  // MOECCL_MOE_MEMORY_CAP: cap in bytes on the memory of one MoE layer on a rank; 0: none. Accepts K, M, G. The same on
  // all ranks.
  int64_t moe_memory_cap = 0;
  // MOECCL_DEBUG: the messages that are written to stderr: ERROR, WARN, INFO or TRACE.
  LogLevel log_level = LogLevel::kWarn;
  // MOECCL_DEBUG_FILE: the file to which messages are appended instead; %h stands for the host's name and %p for the
  // process's number. Empty: stderr.
  std::string log_file;
  // MOECCL_PLAN: forces algorithms; the planner checks the names. Empty: the cheapest. The same on all ranks.
  std::string plan;
  // MOECCL_PROFILE: a profile file, the same on all ranks (docs/calibration.md). Empty: none.
  std::string profile;
  // MOECCL_CALIBRATE: about how many milliseconds may be spent on measuring plans when a communicator is made; the
  // result is cached. 0: never. The same on all ranks.
  int64_t calibrate_ms = 0;
  // MOECCL_CHECK_PLANS: with 1, each plan of a standard collective, of a tensor exchange, of replicated experts and of
  // expert domains is proved when it is built (moecclPlanProve); those of experts and of blocks of any size on up to 64
  // ranks.
  bool check_plans = false;
  // MOECCL_TRIALS: with 0, plans are never tried against each other in the program's own operations. The same on all
  // ranks.
  bool trials = true;
  // MOECCL_KERNELS: forces a table of host kernels by name. Empty: the fastest that this machine runs.
  std::string kernels;
  // MOECCL_TOPOLOGY: a synthetic topology, a file or "auto" (what each host finds). Empty: one flat level, and a level
  // of nodes where ranks are on several hosts. Communicators that come from others by split or shrink do not read it:
  // their ranks keep their places in the topology of the communicator that they come from. Neither do those that grow.
  // The same on all ranks.
  std::string topology;
  // MOECCL_SECRET: admits ranks of other hosts when a launcher starts them (CommInitEnv). Never logged, never in an
  // error.
  std::string secret;
  // MOECCL_SECRET_FILE: a file that holds the secret instead: the user's own with mode 0400 or 0600, or root's, which
  // its group may read too (0440).
  std::string secret_file;
  // MOECCL_SOCKET_ADDR: the address of this host where GetUniqueId listens: "ip" or "ip:port", "[ip6]:port" for IPv6.
  // Empty: a UNIX socket, which reaches this host only. Bad addresses are refused where they are used.
  std::string socket_addr;
  // MOECCL_PORT_RANGE: the TCP ports on which ranks listen for ranks of other hosts, FIRST-LAST; for firewalls. Each
  // rank keeps one port (with RDMA two) for each communicator between hosts, and needs one more per interface while it
  // starts. A port that MOECCL_SOCKET_ADDR names counts before it. Empty: the system's free ports.
  PortRange port_range;
  // MOECCL_NET: the network between hosts: verbs, tcp, plugin, or plugin:NAME for one of NCCL's plugins. Empty: the
  // first one that all ranks can use.
  std::string net;
  // MOECCL_NET_PLUGIN, else NCCL_NET_PLUGIN: which of NCCL's net plugins may be loaded: a list such as "aws-ofi,ucx" of
  // files or names as in libnccl-net-<name>.so, or "none". Empty: libnccl-net.so, if there is one.
  std::string net_plugin;
  // MOECCL_PROFILER_PLUGIN, else NCCL_PROFILER_PLUGIN: the profiler plugin made for NCCL that is told of every
  // operation (docs/plugins.md): a file, a name as in libnccl-profiler-<name>.so, or "none". Empty:
  // libnccl-profiler.so, if there is one.
  std::string profiler_plugin;
  // MOECCL_SOCKET_IFNAME, else NCCL_SOCKET_IFNAME: interfaces for data between hosts, by the beginnings of their names,
  // as in NCCL: "eth,ib0"; "=eth0,eth1" by their whole names; "^docker" or "^=docker0,lo" for all but these. Empty:
  // all that are up, except loopback; of these, those slower than a quarter of the fastest carry nothing.
  std::string socket_ifname;
  // MOECCL_SOCKET_STREAMS: TCP connections per interface to each rank on another host, 1 .. 8; 0: chosen by the
  // interface's rate.
  int32_t socket_streams = 0;
  // MOECCL_SOCKET_CONGESTION: TCP congestion control of the data connections between hosts, as the kernel names it;
  // "system": the system's. Empty: reno to nearby hosts, the system's to others, and cubic where a queue shows that the
  // line is the limit.
  std::string socket_congestion;
  // MOECCL_ENCRYPT: with 1, all data between hosts is encrypted and authenticated, over TCP. The same on all ranks.
  bool encrypt = false;
  // MOECCL_SPIN_US: microseconds for which a wait spins before it sleeps; -1: chosen from the number of cores and
  // ranks.
  int32_t spin_us = -1;
  // MOECCL_CUDA_DRIVER: the CUDA driver's library. Empty: libcuda.so.1; none: no CUDA.
  std::string cuda_driver;
  // MOECCL_CUDA_SMS: the maximum number of multiprocessors that one rank's kernels use at a time; 0: an eighth of the
  // device, at least 16.
  int32_t cuda_sms = 0;
  // MOECCL_CUDA_IPC: with 0, staging stays in host memory even if the ranks could access each other's device memory.
  bool cuda_ipc = true;
  // MOECCL_CUDA_MESSAGE_BYTES: half of the device memory, up to 64M, through which the messages of a pair of ranks of a
  // host pass in one direction. It is divided into slots. 0: a thread drives messages, through page-locked memory
  // between processes. The smallest value of all ranks counts. Accepts K, M.
  int64_t cuda_message_bytes = int64_t{1} << 20;
  // MOECCL_CUDA_STAGING_BYTES: the persistent kernel's staging on the device, in two halves. 0: 64M where NVLink joins
  // the devices of each host and each has 32 GiB, else MOECCL_STAGING_BYTES. The smallest value of all ranks counts.
  // Accepts K, M, G.
  int64_t cuda_staging_bytes = 0;
  // MOECCL_CUDA_PERSISTENT: with 0, a kernel is started for each step instead of one for each operation. If one rank
  // has 0, all ranks do so.
  bool cuda_persistent = true;
  // MOECCL_CUDA_PERSISTENT_BYTES: the largest operation of the persistent kernel (bytes of a rank's larger buffer);
  // larger ones run step by step, where copies use no multiprocessors. Accepts K, M, G. The smallest value of all ranks
  // counts.
  int64_t cuda_persistent_bytes = int64_t{64} << 20;
  // MOECCL_CUDA_GRAPH_MIXING, else NCCL_GRAPH_MIXING_SUPPORT: with 0, CUDA graphs of a communicator's operations have
  // no events that order their replays with each other and with other operations: the program orders them. The same on
  // all ranks.
  bool cuda_graph_mixing = true;
  // MOECCL_HOST_ID: the name of this rank's host. Ranks with different names count as ranks of different hosts,
  // wherever they run, so that one machine can emulate several. Empty: the system's identity.
  std::string host_id;
  // MOECCL_DUMP: where a process writes the last operations and waits of its communicators when one of them fails: a
  // path, to which ".HOST.PID.json" is appended, or in which %h and %p are replaced. Without %p, the process's number
  // is added. A name that another process has taken gets "-2" at its end. Empty: nowhere.
  std::string dump;
  // MOECCL_NO_CMA: with 1, the shared-memory transport does not use process_vm_readv/writev.
  bool no_cma = false;
  // MOECCL_IB_HCA, else NCCL_IB_HCA: RDMA devices and ports that carry data, as in NCCL: "mlx5" for all names that
  // begin with it, "=mlx5_0:1,mlx5_1" for these names exactly, "^mlx5_2" or "^=mlx5_2" for all others; ":1" is a port.
  // Empty: those that the topology assigns to the rank.
  std::string ib_hca;
  // MOECCL_IB_GID_INDEX, else NCCL_IB_GID_INDEX: which address of an RDMA port is used. -1: RoCE v2 before v1, routable
  // before link-local, IPv4 before IPv6.
  int32_t ib_gid_index = -1;
  // MOECCL_IB_TC, else NCCL_IB_TC: the traffic class of RDMA's global route header.
  uint8_t ib_traffic_class = 0;
  // MOECCL_IB_SL, else NCCL_IB_SL: the service level of RDMA's queue pairs.
  uint8_t ib_service_level = 0;
  // MOECCL_IB_TIMEOUT, else NCCL_IB_TIMEOUT: how long an RDMA NIC waits for an acknowledgement. -1: the largest value
  // up to 20 with which all retries end within half of MOECCL_TIMEOUT_MS.
  int32_t ib_timeout = -1;
  // MOECCL_IB_RETRY_CNT, else NCCL_IB_RETRY_CNT: how often an RDMA NIC retries before the link is lost.
  uint8_t ib_retry_count = 7;
  // MOECCL_IB_PKEY, else NCCL_IB_PKEY: the partition of RDMA, which both ends of a link must share.
  uint16_t ib_pkey_index = 0;
  // MOECCL_IB_QPS_PER_CONNECTION, else NCCL_IB_QPS_PER_CONNECTION: queue pairs of RDMA to each peer and port.
  uint32_t ib_queue_pairs = 1;
  // MOECCL_IB_ADAPTIVE_ROUTING, else NCCL_IB_ADAPTIVE_ROUTING: whether RDMA may deliver out of order. With 1 a signal
  // waits until its data has arrived. -1: 1 on InfiniBand, 0 on RoCE.
  int32_t ib_adaptive_routing = -1;
  // MOECCL_IB_LIBRARY: the library to open instead of libibverbs.so.1. none: no RDMA, as with NCCL_IB_DISABLE=1 where
  // this one is not set.
  std::string ib_library;
  // A sentence: the first of NCCL's values for RDMA that is not accepted, for which RDMA is not used. Empty: none.
  std::string ib_refused;
};

inline constexpr uint32_t kMaxQueuePairs = 8;  // MOECCL_IB_QPS_PER_CONNECTION

struct EnvParse {
  Env env;
  Status status;                      // the first bad value: variable, value, accepted values; ok() when all are good
  std::vector<std::string> warnings;  // one sentence for each bad value or unknown MOECCL_ variable
  std::vector<std::string> notes;     // one sentence for each of NCCL's values that counts as another one here
};

// Returns the names of all variables that parse_env reads.
std::vector<std::string_view> variable_names();

// Parses "NAME=value" strings and has no side effects. A bad value leaves its field at its default. With `privileged`,
// variables that name code or files are left out.
EnvParse parse_env(std::span<const char* const> given, bool privileged = false);

// Returns the process's environment as of the first call, which writes the warnings to stderr.
const Env& env();
// Returns InvalidArgument for the first bad value that env() found.
const Status& env_status();

// Converts "64", "64K", "1M", "2G" to bytes; returns false for anything else and on overflow.
bool parse_bytes(std::string_view text, int64_t* bytes);

}  // namespace moeccl
