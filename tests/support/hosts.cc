// SPDX-License-Identifier: Apache-2.0
#include "tests/support/hosts.h"

#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <numeric>
#include <sstream>

namespace moeccl::testing {
namespace {

// printf into a string, because gcc 12 warns without cause about "a" + std::to_string(b).
std::string print(const char* format, ...) __attribute__((format(printf, 1, 2)));
std::string print(const char* format, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof(text), format, arguments);
  va_end(arguments);
  return text;
}

bool enter_namespace(const std::string& path, int type = CLONE_NEWNET) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return false;
  const bool ok = setns(fd, type) == 0;
  close(fd);
  return ok;
}

// Forks an idle child with its own network and host name. Returns 0 when that is not allowed.
pid_t start_holder(const std::string& name) {
  int ready[2];
  if (pipe2(ready, O_CLOEXEC) != 0) return 0;
  const pid_t pid = fork();
  if (pid == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    const bool own = unshare(CLONE_NEWNET | CLONE_NEWUTS) == 0 && sethostname(name.data(), name.size()) == 0;
    const char ok = own ? 'y' : 'n';
    if (write(ready[1], &ok, 1) != 1) _exit(1);
    close(ready[0]), close(ready[1]);
    while (true) pause();
  }
  close(ready[1]);
  char answer = 'n';
  const bool ok = pid > 0 && read(ready[0], &answer, 1) == 1 && answer == 'y';
  close(ready[0]);
  if (ok) return pid;
  if (pid > 0) kill(pid, SIGKILL), waitpid(pid, nullptr, 0);
  return 0;
}

// Runs a command in the namespace `space`. Its output goes to `output`; null: nowhere.
bool shell(const std::string& space, const std::string& command, std::string* output = nullptr) {
  int out[2];
  if (pipe2(out, O_CLOEXEC) != 0) return false;
  const pid_t pid = fork();
  if (pid == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (!enter_namespace(space)) _exit(126);
    dup2(out[1], STDOUT_FILENO);
    dup2(out[1], STDERR_FILENO);
    execl("/bin/sh", "sh", "-c", command.c_str(), nullptr);
    _exit(127);
  }
  close(out[1]);
  std::string text;
  char buffer[512];
  for (ssize_t n; (n = read(out[0], buffer, sizeof(buffer))) > 0 || (n < 0 && errno == EINTR);) {
    if (n > 0) text.append(buffer, static_cast<size_t>(n));
  }
  close(out[0]);
  int status = -1;
  while (pid > 0 && waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  if (output != nullptr) *output = text;
  return pid > 0 && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

// tools/rdma-vm's machines share this folder.
std::string id_for(int machine) { return print("/run/shared/id.%d", machine); }

struct NumberedId {
  int number;
  moecclUniqueId id;
};

}  // namespace

int64_t sent_payload() {
  std::ifstream in("/proc/thread-self/net/dev");
  for (std::string line; std::getline(in, line);) {
    const size_t colon = line.find("eth0:");
    if (colon == std::string::npos) continue;
    std::istringstream words(line.substr(colon + 5));
    std::vector<int64_t> counted;
    for (int64_t value = 0; words >> value;) counted.push_back(value);
    return counted.at(8) - 66 * counted.at(9);
  }
  return -1;
}

std::vector<int> parse_weights(const char* text) {
  std::vector<int> weights;
  while (text != nullptr && *text != 0) {
    char* end = nullptr;
    const long w = strtol(text, &end, 10);
    if (end == text || w < 1 || w > 64 || (*end != 0 && *end != '+') || weights.size() == 64) return {};
    weights.push_back(static_cast<int>(w));
    text = *end == 0 ? end : end + 1;
  }
  return weights;
}

std::unique_ptr<TestHosts> TestHosts::create(const HostsOptions& options, std::string* why) {
  std::unique_ptr<TestHosts> hosts(new TestHosts(options.weights));
  hosts->named_ = options.named;
  hosts->containers_ = options.containers;
  if (options.named) return hosts;
  if (options.containers) {
    if (geteuid() == 0) return hosts;
    *why = "only root may give processes their own host names";
    return nullptr;
  }
  const int n = static_cast<int>(options.weights.size());
  int machine = -1, machines = 0;
  if (const char* text = getenv("MOECCL_TEST_MACHINE");
      text != nullptr && sscanf(text, "%d/%d", &machine, &machines) == 2 && machines == n) {
    hosts->machine_ = machine;
    return hosts;
  }
  if (getenv("MOECCL_TEST_RDMA") != nullptr && n == 2 && options.interfaces == 1 && options.rate.empty()) {
    hosts->rdma_ = true;
    hosts->spaces_ = {"/run/netns/h0", "/run/netns/h1"};
    return hosts;
  }
  for (int i = 0; i <= n; ++i) {
    const pid_t holder = start_holder(print("test-host-%d", i));
    if (holder == 0) {
      *why = "this user may not make network namespaces: " + std::string(strerror(errno));
      return nullptr;
    }
    hosts->holders_.push_back(holder);
    hosts->spaces_.push_back(print("/proc/%d/ns/net", holder));
  }
  std::string setup;
  for (int k = 0; k < options.interfaces; ++k) {
    setup += print("ip link add br%d type bridge && ip link set br%d up && ", k, k);
    for (int i = 0; i < n; ++i) {
      setup += print("ip link add p%d_%d type veth peer name eth%d netns %d && ip link set p%d_%d master br%d up && ",
                     k, i, k, hosts->holders_[static_cast<size_t>(i)], k, i, k);
    }
  }
  if (!shell(hosts->spaces_.back(), setup + "true", why)) return nullptr;
  for (int i = 0; i < n; ++i) {
    std::string host = "ip link set lo up";
    for (int k = 0; k < options.interfaces; ++k) {
      host += print(" && ip addr add %s/24 dev eth%d && ip link set eth%d up", address(i, k).c_str(), k, k);
      if (!options.rate.empty()) {
        host += print(" && tc qdisc add dev eth%d root tbf rate %s burst 128kb latency 20ms", k, options.rate.c_str());
      }
    }
    if (!shell(hosts->spaces_[static_cast<size_t>(i)], host, why)) return nullptr;
  }
  return hosts;
}

TestHosts::~TestHosts() {
  // Restores the hosts for the next test.
  for (int host = 0; rdma_ && touched_ && host < n(); ++host) {
    repair(host);
  }
  for (int host = 0; rdma_ && touched_ && host < n(); ++host) {
    run(host, "for i in $(seq 100); do ip link show eth0 | grep -q 'state UP' && exit; sleep 0.05; done; exit 1");
    const std::string up = print("grep -q ACTIVE /sys/class/infiniband/rxe%d/ports/1/state", host);
    shell("/proc/1/ns/net", "for i in $(seq 100); do " + up + " && exit; sleep 0.05; done; exit 1");
  }
  for (const pid_t holder : holders_) kill(holder, SIGKILL), waitpid(holder, nullptr, 0);
}

int TestHosts::host_of(int process, int n_processes) const {
  const int total = std::accumulate(weights_.begin(), weights_.end(), 0);
  // Uses the middle of the process's share, in units of 1 / (2 n_processes).
  int end = 0;
  for (int h = 0; h < n(); ++h) {
    end += weights_[static_cast<size_t>(h)];
    if ((2 * process + 1) * total < 2 * end * n_processes) return h;
  }
  return n() - 1;
}

// A file is renamed when it is complete, and removed by its reader.
bool TestHosts::publish(int number, const moecclUniqueId& id) const {
  const NumberedId text = {number, id};
  for (int m = 0; m < n(); ++m) {
    if (m == machine_) continue;
    const std::string draft = id_for(m) + ".draft";
    std::ofstream(draft, std::ios::binary).write(reinterpret_cast<const char*>(&text), sizeof(text));
    if (rename(draft.c_str(), id_for(m).c_str()) != 0) return false;
  }
  return true;
}

bool TestHosts::take(int number, moecclUniqueId* id) const {
  NumberedId text = {-1, {}};
  std::ifstream(id_for(machine_), std::ios::binary).read(reinterpret_cast<char*>(&text), sizeof(text));
  if (text.number != number || remove(id_for(machine_).c_str()) != 0) return false;
  *id = text.id;
  return true;
}

std::string TestHosts::address(int host, int interface) { return print("10.77.%d.%d", interface, host + 1); }

bool TestHosts::enter(int host) const {
  if (containers_) {
    return unshare(CLONE_NEWUTS) == 0 && setenv("MOECCL_SOCKET_IFNAME", "lo", 1) == 0 &&
           setenv("MOECCL_SOCKET_ADDR", "127.0.0.1", 1) == 0;
  }
  if (named_) {
    return setenv("MOECCL_HOST_ID", print("test host %d", host).c_str(), 1) == 0 &&
           setenv("MOECCL_SOCKET_IFNAME", "lo", 1) == 0 && setenv("MOECCL_SOCKET_ADDR", "127.0.0.1", 1) == 0;
  }
  if (on_machines()) return setenv("MOECCL_SOCKET_ADDR", print("10.79.0.%d", host + 1).c_str(), 1) == 0;
  if (rdma_ && setenv("NCCL_IB_HCA", print("rxe%d", host).c_str(), 0) != 0) return false;
  if (!rdma_ && !enter_namespace(print("/proc/%d/ns/uts", holders_[static_cast<size_t>(host)]), CLONE_NEWUTS))
    return false;
  return enter_namespace(spaces_[static_cast<size_t>(host)]) &&
         setenv("MOECCL_SOCKET_ADDR", address(host).c_str(), 1) == 0;
}

bool TestHosts::run(int host, const std::string& command) const {
  touched_ = true;
  std::string output;
  if (shell(spaces_[static_cast<size_t>(host)], command, &output)) return true;
  fprintf(stderr, "on host %d: %s: %s\n", host, command.c_str(), output.c_str());
  return false;
}

// The RDMA cable is in the machine's first namespace, see tools/rdma_vm/cable.
bool TestHosts::plug_in_rdma(int host, const char* state) const {
  touched_ = true;
  return rdma_ && shell("/proc/1/ns/net", print("cable %d %s", host, state));
}

bool TestHosts::plug_in(int host, const char* state) const {
  return run(host, print("ip link set eth0 %s", state)) && (!rdma_ || plug_in_rdma(host, state));
}

bool TestHosts::pull_rdma_cable(int host) const { return plug_in_rdma(host, "down"); }

bool TestHosts::pull_cable(int host) const { return plug_in(host, "down"); }

bool TestHosts::repair(int host) const {
  return run(host, "tc qdisc del dev eth0 root 2>/dev/null; true") && plug_in(host, "up");
}

int64_t TestHosts::sent_bytes(int host, int interface) const {
  std::string text;
  // The value is in the line below "TX:" of ip -s link.
  const std::string command = print("ip -s link show eth%d | awk '/TX:/{getline; print $1}'", interface);
  if (!shell(spaces_[static_cast<size_t>(host)], command, &text)) return -1;
  return strtoll(text.c_str(), nullptr, 10);
}

}  // namespace moeccl::testing
