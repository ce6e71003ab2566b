// SPDX-License-Identifier: Apache-2.0
#include "src/driver/file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

#include "src/base/fd.h"

namespace moeccl::driver {
namespace {

namespace fs = std::filesystem;

class ReplaceFile : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = (fs::temp_directory_path() / "moeccl-file-XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    folder_ = name;
  }
  void TearDown() override { fs::remove_all(folder_); }
  std::string path(const char* name) const { return (folder_ / name).string(); }
  static std::string content(const std::string& p) {
    std::ifstream in(p);
    std::stringstream text;
    text << in.rdbuf();
    return text.str();
  }
  size_t entries() const {
    return static_cast<size_t>(std::distance(fs::directory_iterator(folder_), fs::directory_iterator()));
  }
  void refuses(const std::string& p, Code code, const char* part) const {
    const size_t before = entries();
    const Status s = replace_file(p, "new");
    EXPECT_EQ(s.code(), code) << s.message();
    EXPECT_NE(s.message().find(part), std::string::npos) << s.message();
    EXPECT_EQ(entries(), before) << "nothing stays beside it";
  }
  fs::path folder_;
};

TEST_F(ReplaceFile, WritesAllAndKeepsPermissions) {
  ASSERT_TRUE(replace_file(path("a"), "one").ok());
  EXPECT_EQ(content(path("a")), "one");
  ASSERT_EQ(chmod(path("a").c_str(), 0640), 0);
  const std::string large(3 << 20, 'x');
  ASSERT_TRUE(replace_file(path("a"), large).ok());
  EXPECT_EQ(content(path("a")), large);
  struct stat info {};
  ASSERT_EQ(stat(path("a").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 07777, 0640u);
  EXPECT_EQ(entries(), 1u);
}

TEST_F(ReplaceFile, FollowsLinks) {
  fs::create_directory(path("sub"));
  ASSERT_TRUE(replace_file(path("sub/target"), "old").ok());
  fs::create_symlink("sub/target", path("link"));       // relative to the link's folder
  fs::create_symlink(path("link"), path("second"));     // a link to a link
  fs::create_symlink("sub/not-yet", path("dangling"));  // to a file that does not exist yet
  ASSERT_TRUE(replace_file(path("second"), "new").ok());
  EXPECT_EQ(content(path("sub/target")), "new");
  ASSERT_TRUE(replace_file(path("dangling"), "made").ok());
  EXPECT_EQ(content(path("sub/not-yet")), "made");
  for (const char* link : {"link", "second", "dangling"}) EXPECT_TRUE(fs::is_symlink(path(link))) << link;
  EXPECT_EQ(entries(), 4u);
}

TEST_F(ReplaceFile, RefusesWhatIsNoFile) {
  refuses("/dev/null", moecclInvalidArgument, "is a device");
  fs::create_symlink("/dev/null", path("null"));
  refuses(path("null"), moecclInvalidArgument, "is a device, reached by a link");
  ASSERT_EQ(mkfifo(path("pipe").c_str(), 0600), 0);
  refuses(path("pipe"), moecclInvalidArgument, "is a pipe");
  refuses(folder_.string(), moecclInvalidArgument, "is a folder");
  fs::create_symlink("loop", path("loop"));
  refuses(path("loop"), moecclSystemError, "loop");
  refuses(path("none/file"), moecclSystemError, "none/file: no file can be made in its folder: No such file");
  EXPECT_TRUE(fs::is_character_file("/dev/null"));
}

// A program that reads a pipe waits for one that writes, which need not be there.
TEST_F(ReplaceFile, WhatIsNoFileIsNotRead) {
  ASSERT_EQ(mkfifo(path("pipe").c_str(), 0600), 0);
  std::thread rescue([&] {  // opening the pipe waits for this
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
    const Fd writer(open(path("pipe").c_str(), O_WRONLY | O_NONBLOCK | O_CLOEXEC));
  });
  const std::pair<std::string, const char*> others[] = {
      {path("pipe"), "is a pipe"}, {"/dev/zero", "is a device"}, {folder_.string(), "is a folder"}};
  for (const auto& [name, said] : others) {
    const Status s = read_file(name).status();
    EXPECT_EQ(s.code(), moecclInvalidArgument) << name;
    EXPECT_NE(s.message().find(said), std::string::npos) << s.message();
  }
  rescue.join();
  ASSERT_TRUE(replace_file(path("a"), std::string(200'000, 'x')).ok());
  EXPECT_EQ(read_file(path("a")).value().size(), 200'000u);
  EXPECT_EQ(read_file("/proc/self/comm").status().code(), moecclSuccess) << "whose size is 0";
}

}  // namespace
}  // namespace moeccl::driver
