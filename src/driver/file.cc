// SPDX-License-Identifier: Apache-2.0
#include "src/driver/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstring>
#include <vector>

#include "src/base/clock.h"
#include "src/base/fd.h"

namespace moeccl::driver {

namespace {

constexpr int kMostLinks = 40;  // the kernel's limit
constexpr size_t kMaxFile = 256u << 20;

// Returns the folder of a path with its trailing slash, or "" for the current folder.
std::string folder_of(const std::string& path) { return path.substr(0, path.rfind('/') + 1); }

// Follows symbolic links in the path's last component. *info describes the result; st_mode is 0 if nothing is there
// yet.
Result<std::string> behind_links(std::string path, struct stat* info) {
  for (int i = 0; i <= kMostLinks; ++i) {
    *info = {};
    if (lstat(path.c_str(), info) != 0) {
      if (errno == ENOENT) return path;
      return system_error(path, errno);
    }
    if (!S_ISLNK(info->st_mode)) return path;
    char target[PATH_MAX];
    const ssize_t n = readlink(path.c_str(), target, sizeof(target));
    if (n < 0) return system_error(path, errno);
    const std::string next(target, static_cast<size_t>(n));
    path = next.starts_with('/') ? next : folder_of(path) + next;
  }
  return system_error(path, ELOOP);
}

const char* kind_of(mode_t mode) {
  if (S_ISDIR(mode)) return "a folder";
  if (S_ISCHR(mode) || S_ISBLK(mode)) return "a device";
  if (S_ISFIFO(mode)) return "a pipe";
  return S_ISSOCK(mode) ? "a socket" : "not a plain file";
}

Status write_all(int fd, std::string_view text) {
  while (!text.empty()) {
    const ssize_t n = ::write(fd, text.data(), text.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return system_error("write", errno);
    text.remove_prefix(static_cast<size_t>(n));
  }
  return {};
}

}  // namespace

Status replace_file(const std::string& given, std::string_view text) {
  struct stat there {};
  MOECCL_ASSIGN_OR_RETURN(const std::string path, behind_links(given, &there));
  if (there.st_mode != 0 && !S_ISREG(there.st_mode))
    return error(moecclInvalidArgument, "{} is {}{}: give the name of a file", given, kind_of(there.st_mode),
                 path == given ? "" : ", reached by a link");
  if (there.st_mode != 0 && access(path.c_str(), W_OK) != 0) return system_error(path, errno);
  const std::string beside = format("{}.{}.{:x}.tmp", path, getpid(), now_ns());
  Fd fd(open(beside.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666));
  if (fd.get() < 0) return system_error(format("{}: no file can be made in its folder", path), errno);
  Status status = write_all(fd.get(), text);
  if (status.ok() && there.st_mode != 0 && fchmod(fd.get(), there.st_mode & 07777) != 0)
    status = system_error("permissions", errno);
  // Sync before the rename, so that a crash leaves either the old file or the new one.
  if (status.ok() && fsync(fd.get()) != 0 && errno != EINVAL) status = system_error("fsync", errno);
  if (status.ok() && rename(beside.c_str(), path.c_str()) == 0) return {};
  if (status.ok()) status = system_error("rename", errno);
  (void)unlink(beside.c_str());
  return std::move(status).with_context(path);
}

std::string with_ending(const std::string& path, const std::string& ending) {
  const size_t at = path.ends_with(".json") ? path.size() - 5 : path.size();
  return path.substr(0, at) + ending + path.substr(at);
}

Result<std::string> make_file(const std::string& path) {
  constexpr int kMost = 10'000;
  std::string name = path;
  for (int i = 2; i < kMost; ++i) {
    const Fd fd(open(name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
    if (fd) return name;
    if (errno != EEXIST) return system_error(name, errno);
    name = with_ending(path, format("-{}", i));
  }
  return error(moecclSystemError, "{} and {} more files like it are there: remove those of earlier jobs", path, kMost);
}

Status check_folder_of(const std::string& path) {
  const std::string named = folder_of(path), folder = named.empty() ? "." : named;
  if (faccessat(AT_FDCWD, folder.c_str(), W_OK | X_OK, AT_EACCESS) == 0) return {};
  return system_error(format("folder {}", folder), errno);
}

Result<std::string> read_file(const std::string& path) {
  const Fd fd(open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));  // else opening a pipe waits for its writer
  if (!fd) return error(moecclInvalidArgument, "{}: cannot be opened: {}", path, std::strerror(errno));
  struct stat there {};
  if (fstat(fd.get(), &there) != 0) return system_error(path, errno);
  if (!S_ISREG(there.st_mode))
    return error(moecclInvalidArgument, "{} is {}: give the name of a file", path, kind_of(there.st_mode));
  std::string text;
  std::vector<char> block(1 << 16);
  for (;;) {
    const ssize_t n = ::read(fd.get(), block.data(), block.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return error(moecclInvalidArgument, "{}: cannot be read: {}", path, std::strerror(errno));
    if (n == 0) return text;
    text.append(block.data(), static_cast<size_t>(n));
    if (text.size() > kMaxFile) return error(moecclInvalidArgument, "{}: more than {} bytes", path, kMaxFile);
  }
}

}  // namespace moeccl::driver
