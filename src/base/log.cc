// SPDX-License-Identifier: Apache-2.0
#include "src/base/log.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstring>
#include <ctime>
#include <exception>
#include <string>

#include "src/base/clock.h"

namespace moeccl {
namespace {

constexpr int kLinesPerSecond = 200;    // more than anyone can follow, but far too little to fill a disk in a day
constexpr size_t kMaxLineBytes = 2048;  // below PIPE_BUF (4096), so that one write() to a pipe is atomic

// Returns true if this line may be written. Counts the refused lines and reports the count with the next second's first
// line.
bool admit(int* dropped_before) {
  static std::atomic<int64_t> second{0};
  static std::atomic<int> lines{0};
  const int64_t now = now_ns() / 1'000'000'000;
  int64_t seen = second.load(std::memory_order_relaxed);
  if (seen != now && second.compare_exchange_strong(seen, now, std::memory_order_relaxed)) {
    const int past = lines.exchange(0, std::memory_order_relaxed);
    if (past > kLinesPerSecond) *dropped_before = past - kLinesPerSecond;
  }
  return lines.fetch_add(1, std::memory_order_relaxed) < kLinesPerSecond;
}

// A reader of the log that was stopped or is slow has this long, once, until it reads again.
constexpr int kMostWaitMs = 100;
std::atomic<bool> is_unread[2];  // stderr, the file
std::atomic<int> lost_lines{0};  // since a line was last written

// Returns 0 when there is room, else an errno. EAGAIN: what is in the way is not read.
int wait_for_room(int fd, Deadline deadline) {
  while (true) {
    pollfd entry = {fd, POLLOUT, 0};
    const int n = ::poll(&entry, 1, deadline.remaining_ms());
    if (n > 0) return 0;
    if (n == 0) return EAGAIN;
    if (errno != EINTR) return errno;
  }
}

// Returns 0 when the whole line was written, else an errno. A pipe with some room takes a whole line, unless another
// process fills it between the two calls.
int put(int fd, std::string_view line) {
  std::atomic<bool>& unread = is_unread[fd == STDERR_FILENO ? 0 : 1];
  const int no_room = wait_for_room(fd, Deadline::after_ms(unread.load(std::memory_order_relaxed) ? 0 : kMostWaitMs));
  unread.store(no_room == EAGAIN, std::memory_order_relaxed);
  if (no_room != 0) return no_room;
  ssize_t n;
  do {
    n = ::write(fd, line.data(), line.size());
  } while (n < 0 && errno == EINTR);
  if (n < 0) return errno;
  return static_cast<size_t>(n) == line.size() ? 0 : ENOSPC;  // the rest had no room
}

std::string host_name() {
  char host[HOST_NAME_MAX + 1] = {};
  (void)::gethostname(host, HOST_NAME_MAX);
  return host;
}

// Returns "moeccl: node7:4117 2026-11-28T09:53:17.123Z WARN ", so that lines of many processes can be told apart and
// put in order.
std::string head(const char* level) {
  timespec now = {};
  (void)::clock_gettime(CLOCK_REALTIME, &now);
  // The C library's conversion takes a lock that a fork may leave locked.
  const std::chrono::sys_seconds at{std::chrono::seconds(now.tv_sec)};
  const auto day = std::chrono::floor<std::chrono::days>(at);
  const std::chrono::year_month_day date(day);
  const std::chrono::hh_mm_ss time(at - day);
  return format("moeccl: {}:{} {}-{:02}-{:02}T{:02}:{:02}:{:02}.{:03}Z {} ", host_name(), ::getpid(),
                static_cast<int>(date.year()), static_cast<unsigned>(date.month()), static_cast<unsigned>(date.day()),
                time.hours().count(), time.minutes().count(), time.seconds().count(), now.tv_nsec / 1'000'000, level);
}

// Returns where lines go. A process opens the file itself at its first line, a forked one too, without a lock that a
// fork could leave locked.
int destination() {
  const std::string& named = env().log_file;
  if (named.empty()) return STDERR_FILENO;
  static std::atomic<uint64_t> opened{0};  // process << 32 | descriptor + 1
  const auto pid = static_cast<uint32_t>(::getpid());
  uint64_t seen = opened.load(std::memory_order_acquire);
  if (seen >> 32 != pid) {
    const std::string path = for_process(named, host_name(), static_cast<int>(pid));
    int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (fd < 0) {
      const std::string why = std::strerror(errno);
      (void)put(STDERR_FILENO, format("{}MOECCL_DEBUG_FILE: {} cannot be opened: {}; messages go to stderr\n",
                                      head("WARN"), path, why));
      fd = STDERR_FILENO;
    }
    if (opened.compare_exchange_strong(seen, uint64_t{pid} << 32 | static_cast<uint32_t>(fd + 1))) return fd;
    if (fd != STDERR_FILENO) ::close(fd);  // another thread was first
  }
  return static_cast<int>(seen & 0xffffffff) - 1;
}

void write_whole(std::string line) {
  if (line.size() > kMaxLineBytes) {
    line.resize(kMaxLineBytes - 4);
    line += "...";
  }
  // Text inside a line must not be able to forge another line of the log.
  for (char& c : line) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = '?';
  }
  line += '\n';
  const int saved = errno;  // logging must not change the errno that the caller is about to report
  const int fd = destination();
  int failed = put(fd, line);
  if (failed != 0 && fd != STDERR_FILENO) {
    // The line may be the one that says what is wrong. Later lines try the file again.
    static std::atomic<bool> said{false};
    if (!said.exchange(true, std::memory_order_relaxed)) {
      (void)put(STDERR_FILENO, format("{}MOECCL_DEBUG_FILE: a line could not be written: {}; such lines go to stderr\n",
                                      head("WARN"), std::strerror(failed)));
    }
    failed = put(STDERR_FILENO, line);
  }
  if (failed == EAGAIN) {
    lost_lines.fetch_add(1, std::memory_order_relaxed);
  } else if (const int lost = lost_lines.exchange(0, std::memory_order_relaxed); lost > 0) {
    (void)put(
        fd, format("{}before this, {} log lines were lost, because nobody read what was there\n", head("WARN"), lost));
  }
  errno = saved;
}

}  // namespace

std::string for_process(std::string_view named, std::string_view host, int pid) {
  std::string path;
  for (size_t i = 0; i < named.size(); ++i) {
    const char next = i + 1 < named.size() && named[i] == '%' ? named[i + 1] : 0;
    if (next != 'h' && next != 'p') {
      path += named[i];
      continue;
    }
    path += next == 'h' ? std::string(host) : std::to_string(pid);
    ++i;
  }
  return path;
}

bool log_enabled(LogLevel level) { return level <= env().log_level; }

void write_log_line(LogLevel level, std::string_view text) {
  constexpr const char* kNames[] = {"ERROR", "WARN", "INFO", "TRACE"};
  int dropped = 0;
  const bool admitted = admit(&dropped);
  if (dropped > 0) write_whole(format("{}{} log lines were dropped", head("WARN"), dropped));
  if (!admitted && level != LogLevel::kError) return;
  write_whole(head(kNames[static_cast<size_t>(level)]).append(text));
}

void write_log(LogLevel level, fmt::string_view text, fmt::format_args args) noexcept {
  try {
    write_log_line(level, format_args_to_string(text, args));
  } catch (const std::exception&) {
    constexpr std::string_view kInstead = "moeccl: no memory for a log line\n";
    (void)put(STDERR_FILENO, kInstead);
  }
}

}  // namespace moeccl
