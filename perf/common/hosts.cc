// SPDX-License-Identifier: Apache-2.0
#include "perf/common/hosts.h"

#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

namespace moeccl::perf {
namespace {

// Forks an idle child in its own network and host name namespaces. Returns 0 when that is not allowed.
pid_t start_holder(int number) {
  int ready[2];
  if (pipe2(ready, O_CLOEXEC) != 0) return 0;
  const pid_t pid = fork();
  if (pid == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    const std::string name = "moeccl-host" + std::to_string(number);
    const bool done = unshare(CLONE_NEWNET | CLONE_NEWUTS) == 0 && sethostname(name.c_str(), name.size()) == 0;
    const char answer = done ? 'y' : 'n';
    if (write(ready[1], &answer, 1) != 1) _exit(1);
    close(ready[0]);
    close(ready[1]);
    while (true) pause();
  }
  close(ready[1]);
  char answer = 'n';
  const bool there = pid > 0 && read(ready[0], &answer, 1) == 1 && answer == 'y';
  close(ready[0]);
  if (there) return pid;
  if (pid > 0) {
    kill(pid, SIGKILL);
    waitpid(pid, nullptr, 0);
  }
  return 0;
}

bool enter_namespaces(pid_t holder) {
  for (const char* kind : {"net", "uts"}) {
    const std::string path = "/proc/" + std::to_string(holder) + "/ns/" + kind;
    const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) return false;
    const bool entered = setns(fd, 0) == 0;
    close(fd);
    if (!entered) return false;
  }
  return true;
}

bool shell(pid_t holder, const std::string& command) {
  const pid_t pid = fork();
  if (pid == 0) {
    if (!enter_namespaces(holder)) _exit(126);
    execl("/bin/sh", "sh", "-c", (command + " >/dev/null 2>&1").c_str(), nullptr);
    _exit(127);
  }
  int status = -1;
  while (pid > 0 && waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  return pid > 0 && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

// Takes every other core that this process may use, so that the hosts share none where there are enough.
bool take_cores(int host) {
  cpu_set_t all, mine;
  CPU_ZERO(&all);
  CPU_ZERO(&mine);
  if (sched_getaffinity(0, sizeof(all), &all) != 0) return false;
  if (CPU_COUNT(&all) < 2) return true;
  for (int core = 0, n = 0; core < CPU_SETSIZE; ++core)
    if (CPU_ISSET(core, &all) && n++ % 2 == host) CPU_SET(core, &mine);
  return sched_setaffinity(0, sizeof(mine), &mine) == 0;
}

std::string address(int host) { return "10.77.0." + std::to_string(host + 1); }

}  // namespace

std::unique_ptr<TwoHosts> TwoHosts::create(const std::string& rate, std::string* why) {
  std::unique_ptr<TwoHosts> made(new TwoHosts());
  for (int i = 0; i < 2; ++i) {
    made->holders_[i] = start_holder(i);
    if (made->holders_[i] == 0) {
      *why = "this user may not make network namespaces";
      return nullptr;
    }
  }
  *why = "ip and tc cannot join two namespaces here";
  const std::string other = std::to_string(made->holders_[1]);
  if (!shell(made->holders_[0], "ip link add eth0 type veth peer name eth0 netns " + other)) return nullptr;
  // A NIC has no token bucket. With a large one (128 kB), messages up to its size pass at the rate of memory, and no
  // line fits the times.
  for (int i = 0; i < 2; ++i) {
    const std::string up = "ip link set lo up && ip addr add " + address(i) + "/24 dev eth0 && ip link set eth0 up";
    const std::string shape = " && tc qdisc add dev eth0 root tbf rate " + rate + " burst 32kb latency 50ms";
    if (!shell(made->holders_[i], up + shape)) return nullptr;
  }
  // The kernel takes up to a second to notice that both ends are up.
  const std::string wait =
      "for i in $(seq 100); do ip link show eth0 | grep -q 'state UP' && exit 0; sleep 0.05; done; exit 1";
  for (const pid_t holder : made->holders_)
    if (!shell(holder, "(" + wait + ")")) return nullptr;
  why->clear();
  return made;
}

TwoHosts::~TwoHosts() {
  for (const pid_t holder : holders_) {
    if (holder == 0) continue;
    kill(holder, SIGKILL);
    waitpid(holder, nullptr, 0);
  }
}

bool TwoHosts::enter(int host) const {
  return enter_namespaces(holders_[host]) && take_cores(host) &&
         setenv("MOECCL_SOCKET_ADDR", address(host).c_str(), 1) == 0;
}

}  // namespace moeccl::perf
