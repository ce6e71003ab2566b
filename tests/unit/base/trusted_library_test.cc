// SPDX-License-Identifier: Apache-2.0
#include "src/base/trusted_library.h"

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <fstream>

namespace moeccl {
namespace {

class TrustedLibrary : public ::testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/moeccl-trusted-XXXXXX";
    ASSERT_NE(mkdtemp(name), nullptr);
    folder_ = name;
    file_ = folder_ + "/library.so";
    std::ofstream(file_) << "code";
    chmod(file_.c_str(), 0644);
  }
  void TearDown() override {
    chmod(folder_.c_str(), 0700);
    (void)!system(("rm -rf " + folder_).c_str());
  }
  std::string why(std::string file) { return why_not_loaded(&file); }

  std::string folder_, file_;
};

TEST_F(TrustedLibrary, AFileOfTheUsersOwnIsLoadedByItsRealPath) {
  EXPECT_EQ(why(file_), "");
  ASSERT_EQ(symlink(file_.c_str(), (folder_ + "/link").c_str()), 0);
  std::string link = folder_ + "/link";
  EXPECT_EQ(why_not_loaded(&link), "");
  EXPECT_EQ(link, file_);
}

TEST_F(TrustedLibrary, APathMustBeAbsolute) {
  EXPECT_NE(why("library.so").find("not an absolute path"), std::string::npos);
  EXPECT_NE(why("./library.so").find("not an absolute path"), std::string::npos);
  EXPECT_NE(why("").find("not an absolute path"), std::string::npos);
  EXPECT_NE(why("/nonexistent/library.so").find("No such file"), std::string::npos);
  EXPECT_NE(why(folder_).find("is not a regular file"), std::string::npos);
}

TEST_F(TrustedLibrary, NobodyElseMayWriteTheFileOrAFolderAboveIt) {
  chmod(file_.c_str(), 0646);
  EXPECT_NE(why(file_).find(file_ + " can be written by every user"), std::string::npos) << why(file_);
  chmod(file_.c_str(), 0644);
  for (const mode_t open : {0777, 01777}) {  // not allowed for its own folder, even with the sticky bit
    chmod(folder_.c_str(), open);
    EXPECT_NE(why(file_).find(folder_ + " can be written by every user"), std::string::npos) << why(file_);
  }
  chmod(folder_.c_str(), 0755);
  const std::string inner = folder_ + "/inner", deep = inner + "/library.so";
  ASSERT_EQ(mkdir(inner.c_str(), 0755), 0);
  std::ofstream(deep) << "code";
  EXPECT_EQ(why(deep), "");
  chmod(folder_.c_str(), 0777);
  EXPECT_NE(why(deep).find(folder_ + " can be written by every user"), std::string::npos) << why(deep);
}

TEST_F(TrustedLibrary, TheOwnerIsTheUserOrRoot) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root to give a file away";
  ASSERT_EQ(chown(file_.c_str(), 12345, 12345), 0);
  EXPECT_NE(why(file_).find("belongs to user 12345"), std::string::npos) << why(file_);
  // The owner may load it, and also root's library.
  ASSERT_EQ(chmod(folder_.c_str(), 0755), 0);
  const pid_t child = fork();
  if (child == 0) _exit(seteuid(12345) == 0 && why(file_).empty() ? 0 : 1);
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace moeccl
