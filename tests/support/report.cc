// SPDX-License-Identifier: Apache-2.0
#include "tests/support/report.h"

#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>

namespace moeccl::testing {
namespace {

constexpr size_t kMessageBytes = 64 * 1024;  // a rank's report is cut to this
constexpr size_t kFindingBytes = 4 * 1024;
constexpr int kMaxFindings = 12;  // the first ones are enough

void put_int(std::string& out, int value) {
  const int32_t v = value;
  out.append(reinterpret_cast<const char*>(&v), sizeof(v));
}

void put_text(std::string& out, const char* text) {
  const size_t length = strnlen(text, kFindingBytes);
  put_int(out, static_cast<int>(length));
  out.append(text, length);
}

int take_int(const char*& p, const char* end) {
  int32_t v = 0;
  if (end - p < static_cast<ptrdiff_t>(sizeof(v))) return 0;
  memcpy(&v, p, sizeof(v));
  p += sizeof(v);
  return v;
}

std::string take_text(const char*& p, const char* end) {
  const int length = take_int(p, end);
  if (length < 0 || length > end - p) return {};
  std::string text(p, static_cast<size_t>(length));
  p += length;
  return text;
}

}  // namespace

// SEQPACKET keeps messages whole and, unlike a pipe, of any size up to the socket's buffer.
bool make_report_pipe(int fds[2]) { return socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fds) == 0; }

void send_report(int fd, int rank, const ::testing::TestPartResultArray& found) {
  std::string message;
  put_int(message, rank);
  int n = 0;
  for (int i = 0; i < found.size() && n < kMaxFindings; ++i) {
    const ::testing::TestPartResult& part = found.GetTestPartResult(i);
    if (!part.failed() || message.size() + kFindingBytes * 2 > kMessageBytes) continue;
    ++n;
    put_text(message, part.file_name() != nullptr ? part.file_name() : "?");
    put_int(message, part.line_number());
    put_text(message, part.message());
  }
  if (send(fd, message.data(), message.size(), MSG_NOSIGNAL) < 0) _exit(24);
}

bool receive_report(int fd, Report* report) {
  std::string buffer(kMessageBytes, '\0');
  const ssize_t n = recv(fd, buffer.data(), buffer.size(), 0);
  if (n <= 0) return false;
  const char* p = buffer.data();
  const char* end = p + n;
  report->rank = take_int(p, end);
  while (p < end) {
    Finding f;
    f.file = take_text(p, end);
    f.line = take_int(p, end);
    f.message = take_text(p, end);
    report->findings.push_back(std::move(f));
  }
  return true;
}

}  // namespace moeccl::testing
