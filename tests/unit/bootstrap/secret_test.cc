// SPDX-License-Identifier: Apache-2.0
#include "src/bootstrap/secret.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>

namespace moeccl::bootstrap {
namespace {

struct File {
  explicit File(const std::string& text, mode_t mode = 0600) {
    const int fd = ::mkstemp(path);
    EXPECT_GE(fd, 0);
    ::close(fd);
    std::ofstream(path) << text;
    EXPECT_EQ(::chmod(path, mode), 0);
  }
  ~File() { ::unlink(path); }
  char path[32] = "/tmp/moeccl-secret-XXXXXX";
};

TEST(Secret, IsReadFromAFileOfItsOwner) {
  const File file("a secret of the test\n");
  const auto secret = read_secret_file(file.path);
  ASSERT_TRUE(secret.ok()) << secret.status().message();
  EXPECT_EQ(secret.value(), "a secret of the test");
}

TEST(Secret, OfAFileThatOthersMayUseIsRefused) {
  for (const mode_t mode : {0604, 0620, 0666}) {
    const File file("a secret of the test", mode);
    const Status s = read_secret_file(file.path).status();
    EXPECT_EQ(s.code(), moecclInvalidUsage);
    EXPECT_NE(s.message().find("chmod 600"), std::string::npos) << s.message();
  }
  if (::geteuid() != 0) return;
  const File file("a secret of the test");
  ASSERT_EQ(::chown(file.path, 65534, 65534), 0);
  const Status s = read_secret_file(file.path).status();
  EXPECT_NE(s.message().find("user 65534"), std::string::npos) << s.message();
}

// As Kubernetes' fsGroup gives a pod its secret.
TEST(Secret, OfRootMayBeReadableForItsGroup) {
  const File file("a secret of the test", 0440);
  EXPECT_EQ(read_secret_file(file.path).ok(), ::geteuid() == 0) << "only root's file may be";
}

TEST(Secret, ErrorsSayWhatToDoAndNotTheSecret) {
  const File short_one("hunter2\n"), long_one(std::string(5000, 'x'));
  for (const File* f : {&short_one, &long_one}) {
    const Status s = read_secret_file(f->path).status();
    EXPECT_EQ(s.code(), moecclInvalidUsage);
    EXPECT_NE(s.message().find("16 to 4096"), std::string::npos) << s.message();
    EXPECT_EQ(s.message().find("hunter2"), std::string::npos) << s.message();
  }
  EXPECT_EQ(read_secret_file("/nowhere/secret").status().code(), moecclSystemError);
  EXPECT_EQ(read_secret_file("/tmp").status().code(), moecclInvalidUsage);
}

}  // namespace
}  // namespace moeccl::bootstrap
