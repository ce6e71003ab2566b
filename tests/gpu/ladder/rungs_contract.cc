// SPDX-License-Identifier: Apache-2.0
// Runs the kernels' contract test (tests/unit/cuda_kernels) on the driver, with the program in this one's folder.
#include <fcntl.h>
#include <limits.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "src/base/fd.h"
#include "tests/gpu/ladder/ladder.h"

namespace moeccl::ladder {
namespace {

Result<std::string> contract(const char* filter) {
  char self[PATH_MAX] = {};
  if (readlink("/proc/self/exe", self, sizeof(self) - 1) < 0) return system_error("/proc/self/exe", errno);
  std::string program = self;
  program = program.substr(0, program.rfind('/')) + "/cuda_kernels_on_driver";
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return system_error("a pipe", errno);
  const Fd from(ends[0]);
  Fd to(ends[1]);
  const pid_t child = fork();
  if (child == 0) {
    dup2(to.get(), 1);
    const std::string only = std::string("--gtest_filter=") + filter;
    execl(program.c_str(), program.c_str(), only.c_str(), static_cast<char*>(nullptr));
    _exit(127);
  }
  to.reset();
  std::string text, first, summary;
  char piece[4096];
  for (ssize_t n; (n = read(from.get(), piece, sizeof(piece))) > 0;) text.append(piece, static_cast<size_t>(n));
  int status = 0;
  (void)waitpid(child, &status, 0);
  std::fputs(text.c_str(), stderr);
  unsigned passed = 0;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find('\n', at), text.size());
    const std::string line = text.substr(at, end - at);
    if (line.starts_with("[  PASSED  ]")) passed = static_cast<unsigned>(std::atoi(line.c_str() + 12));
    if (line.ends_with(" launches")) summary = line;
    // The line after the one with a failure's position says what failed.
    if (first.empty() && line.ends_with(": Failure")) {
      first = line.substr(line.rfind('/') + 1) + " " + text.substr(end + 1, 200);
    }
    at = end + 1;
  }
  if (WIFSIGNALED(status)) return error(moecclInternalError, "ended by signal {}", WTERMSIG(status));
  if (status != 0) return error(moecclInternalError, "exit code {}; {}", WEXITSTATUS(status), first);
  if (passed == 0) return error(moecclInternalError, "0 tests ran");
  return format("{} tests, {}", passed, summary);
}

}  // namespace

Result<std::string> contract_bytes() { return contract("CudaCopy.*:CudaReduce.*"); }
Result<std::string> contract_rows() { return contract("CudaRows.*"); }
Result<std::string> contract_sparse() { return contract("CudaSparse.*:CudaCodec*"); }
Result<std::string> contract_routes() { return contract("CudaRoute.*"); }
// The emulation takes seconds for a routing of thousands of ranks, which unit_cuda_kernels covers.
Result<std::string> contract_records() { return contract(cu::emulated() ? "CudaRecords.*-*Groups*" : "CudaRecords.*"); }
Result<std::string> contract_tables() { return contract("CudaTables.*"); }

}  // namespace moeccl::ladder
