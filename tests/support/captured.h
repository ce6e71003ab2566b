// SPDX-License-Identifier: Apache-2.0
// What a process writes.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <string>

namespace moeccl::testing {

// Returns what this process writes to stderr during `body`.
template <class Body>
std::string log_of(Body&& body) {
  std::FILE* const kept = std::tmpfile();
  const int before = dup(STDERR_FILENO);
  dup2(fileno(kept), STDERR_FILENO);
  body();
  dup2(before, STDERR_FILENO);
  close(before);
  std::string text(static_cast<size_t>(lseek(fileno(kept), 0, SEEK_END)), '\0');
  EXPECT_EQ(pread(fileno(kept), text.data(), text.size(), 0), static_cast<ssize_t>(text.size()));
  std::fclose(kept);
  return text;
}

}  // namespace moeccl::testing
