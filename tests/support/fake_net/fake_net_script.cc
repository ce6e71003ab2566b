// SPDX-License-Identifier: Apache-2.0
#include "tests/support/fake_net/fake_net_script.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>

#include "tests/support/fake_net/fake_net.h"

namespace fake_net {
namespace {

std::mutex mutex;  // guards everything below
Script script;
std::map<std::string, long> counts;
long sends_left_to_fail = 0, registrations_left_to_fail = 0;
bool aborted = false;
abi::Logger logger = nullptr;

void parse(const char* text) {
  const std::lock_guard lock(mutex);
  script = {};
  aborted = false;
  sends_left_to_fail = registrations_left_to_fail = 0;
  std::string all = text == nullptr ? "" : text;
  for (size_t at = 0; at < all.size();) {
    const size_t end = std::min(all.find(' ', at), all.size());
    const std::string word = all.substr(at, end - at);
    const size_t is = word.find('=');
    const std::string name = word.substr(0, is), value = is == std::string::npos ? "" : word.substr(is + 1);
    const int n = std::atoi(value.c_str());
    if (name == "devices") script.devices = n;
    if (name == "null") script.null = std::max(1, n);
    if (name == "late") script.late_us = n;
    if (name == "fail") sends_left_to_fail = script.fail = n;
    if (name == "locked") registrations_left_to_fail = script.unregistered = n;
    if (name == "refuse") script.refuse = true;
    if (name == "quiet") script.quiet = true;
    if (name == "deaf") script.deaf = true;
    if (name == "apart") script.apart = true;
    if (name == "never") script.never = true;
    if (name == "accept") script.block_accept = true;
    if (name == "untold") script.untold = true;
    if (name == "cuda") script.cuda = true;
    if (name == "gpu") script.gpu = true;
    if (name == "init") script.init = true;
    if (name == "interfaces") script.interfaces = true;
    if (name == "hold") script.hold = true;
    at = end + 1;
  }
}
const bool scripted = (parse(getenv("FAKE_NET")), true);

}  // namespace

Script now() {
  const std::lock_guard lock(mutex);
  return script;
}
bool breaks_a_send() {
  const std::lock_guard lock(mutex);
  return sends_left_to_fail > 0 && --sends_left_to_fail == 0;
}
bool may_register() {
  const std::lock_guard lock(mutex);
  return script.unregistered == 0 || --registrations_left_to_fail != 0;
}
bool is_aborted() {
  const std::lock_guard lock(mutex);
  return aborted;
}
void abort_all() {
  count("aborted");
  const std::lock_guard lock(mutex);
  aborted = true;
}
void count(const char* call, long n) {
  const std::lock_guard lock(mutex);
  counts[call] += n;
}
void most(const char* what, long n) {
  const std::lock_guard lock(mutex);
  counts[what] = std::max(counts[what], n);
}
void log_to(abi::Logger to) {
  const std::lock_guard lock(mutex);
  logger = to;
}
abi::Code refuse(abi::Code code, const char* why) {
  if (logger != nullptr) logger(2, 0x10, __FILE__, __LINE__, "fake: %s\n", why);
  return code;
}

}  // namespace fake_net

extern "C" {
__attribute__((visibility("default"))) void fake_net_script(const char* text) { fake_net::parse(text); }
__attribute__((visibility("default"))) long fake_net_count(const char* call) {
  const std::lock_guard lock(fake_net::mutex);
  return fake_net::counts[call];
}
}
