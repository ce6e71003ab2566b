// SPDX-License-Identifier: Apache-2.0
// What a test asks of the fake net plugin (fake_net.h), and what the plugin counts for the test. Any thread.
#pragma once

#include "transport/netplugin/abi.h"

namespace fake_net {

namespace abi = moeccl::transport::netplugin::abi;

struct Script {
  int devices = 1, null = 1, late_us = 0;
  long fail = 0, unregistered = 0;
  bool refuse = false, never = false, block_accept = false, untold = false, cuda = false, gpu = false, init = false;
  bool interfaces = false, quiet = false, deaf = false, apart = false, hold = false;
};
Script now();
bool breaks_a_send();  // the send that begins now is the one that has to break
bool may_register();
// What all comms share, see close_comm().
bool is_aborted();
void abort_all();

void count(const char* call, long n = 1);
void most(const char* what, long n);
void log_to(abi::Logger logger);
abi::Code refuse(abi::Code code, const char* why);

}  // namespace fake_net
