// SPDX-License-Identifier: Apache-2.0
// Hosts for tests: network namespaces with their own host names ("test-host-0", ...), joined by veth pairs over a
// bridge in another namespace. A child process holds each of them, so nothing is left behind however the test ends.
// Needs root, ip and tc.
//
// Alternatively, hosts can exist by name only (MOECCL_HOST_ID). They need nothing, and reach each other over loopback.
//
// In tools/rdma-vm's machine (MOECCL_TEST_RDMA), two hosts are that machine's hosts, h0 and h1, each with its RDMA
// device.
//
// In one of the machines of `tools/rdma-vm --machines N` (MOECCL_TEST_MACHINE), the hosts are those machines, if there
// are as many. The program runs on each of them and starts the processes that belong there, so a test may not share
// memory between ranks.
//
// MOECCL_TEST_HOSTS="3+1" (namespaces; "named:3+1": by name) places the processes of every run_ranks() of a test
// program on hosts in this proportion, so that any test can run over the network.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "moeccl/moeccl.h"

namespace moeccl::testing {

struct HostsOptions {
  std::vector<int> weights = {1, 1};  // processes are spread over the hosts in this proportion, in order
  int interfaces = 1;                 // of each host: eth0 (10.77.0.x), eth1 (10.77.1.x), ...
  std::string rate = {};              // tbf limit of what each interface sends, such as "1gbit"; empty: none
  bool named = false;                 // by name only: needs no rights, and has no cables
  bool containers = false;            // each process has its own host name, but this machine's network
};

class TestHosts {
 public:
  // Returns null, with the reason, where the kernel or the user does not allow it.
  static std::unique_ptr<TestHosts> create(const HostsOptions& options, std::string* why);
  ~TestHosts();
  TestHosts(const TestHosts&) = delete;
  TestHosts& operator=(const TestHosts&) = delete;

  int n() const { return static_cast<int>(weights_.size()); }
  int host_of(int process, int n_processes) const;
  bool is_here(int process, int n_processes) const {
    return !on_machines() || host_of(process, n_processes) == machine_;
  }
  bool on_machines() const { return machine_ >= 0; }
  // Give the id of call `number` of run_ranks to the other machines, and take it from that of rank 0.
  bool publish(int number, const moecclUniqueId& id) const;
  bool take(int number, moecclUniqueId* id) const;
  static std::string address(int host, int interface = 0);
  // Moves the calling child, which has one thread, to the host, and sets where GetUniqueId listens.
  bool enter(int host) const;
  // Runs a shell command on the host. Returns true when it succeeded. May be called from any thread.
  bool run(int host, const std::string& command) const;
  // Cut the host off in both directions, or only what it sends.
  bool pull_cable(int host) const;
  // Pulls the RDMA cable only, in tools/rdma-vm's machine.
  bool pull_rdma_cable(int host) const;
  bool drop_what_it_sends(int host) const { return run(host, "tc qdisc replace dev eth0 root blackhole"); }
  // Ends what the three have done, on hosts without `rate`.
  bool repair(int host) const;
  // Returns the bytes that the host's interface has sent since it was created, including frames.
  int64_t sent_bytes(int host, int interface = 0) const;

 private:
  TestHosts(std::vector<int> weights) : weights_(std::move(weights)) {}
  std::vector<int> weights_;
  bool plug_in(int host, const char* state) const;
  bool plug_in_rdma(int host, const char* state) const;
  bool named_ = false;
  bool containers_ = false;
  bool rdma_ = false;                          // the hosts of tools/rdma-vm
  int machine_ = -1;                           // the number of this one, where hosts are machines
  mutable std::atomic<bool> touched_ = false;  // a command ran there
  std::vector<pid_t> holders_;                 // of the hosts, then of the switch
  std::vector<std::string> spaces_;            // of the hosts, then of the switch: the files of their namespaces
};

// Returns the bytes of payload that the calling rank's host has sent over eth0: what Linux counts, less the 66 bytes of
// Ethernet, IP and TCP headers of each packet as it left TCP (a large packet that was not cut counts once). Returns -1
// when there is no eth0.
int64_t sent_payload();

// Parses "3+1" to {3, 1}. Returns nothing for any other text.
std::vector<int> parse_weights(const char* text);

}  // namespace moeccl::testing
