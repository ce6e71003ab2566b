// SPDX-License-Identifier: Apache-2.0
#include "src/bootstrap/secret.h"

#include <fcntl.h>
#include <sodium.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <map>
#include <mutex>

#include "src/base/env.h"
#include "src/base/fd.h"
#include "src/bootstrap/handshake.h"
#include "src/driver/fork_page.h"

namespace moeccl::bootstrap {
namespace {

constexpr size_t kShortest = 16, kLongest = 4096;

Result<std::string> read_secret() {
  const Env& e = env();
  if (!e.secret.empty() && !e.secret_file.empty())
    return error(moecclInvalidUsage, "MOECCL_SECRET and MOECCL_SECRET_FILE are both set: set one of them");
  if (e.secret_file.empty()) return e.secret;
  Result<std::string> read = read_secret_file(e.secret_file);
  if (!read.ok()) return std::move(read).status().with_context("MOECCL_SECRET_FILE");
  return read;
}

Result<Key> stretched(const std::string& secret, const std::string& job) {
  const Key salt = derive_key(std::as_bytes(std::span(job.data(), job.size())), "moeccl secret");
  static_assert(sizeof(salt) >= crypto_pwhash_SALTBYTES);
  if (sodium_init() < 0) return Status(moecclSystemError, "libsodium cannot be initialised");
  Key key;
  if (crypto_pwhash(reinterpret_cast<unsigned char*>(key.data()), key.size(), secret.data(), secret.size(),
                    reinterpret_cast<const unsigned char*>(salt.data()), crypto_pwhash_OPSLIMIT_INTERACTIVE,
                    crypto_pwhash_MEMLIMIT_INTERACTIVE, crypto_pwhash_ALG_ARGON2ID13) != 0) {
    return error(moecclOutOfMemory, "no memory: {} MiB are needed briefly to derive the key of MOECCL_SECRET",
                 crypto_pwhash_MEMLIMIT_INTERACTIVE >> 20);
  }
  return key;
}

}  // namespace

bool has_secret() { return !env().secret.empty() || !env().secret_file.empty(); }

Result<std::string> read_secret_file(const std::string& path) {
  const Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!fd) return system_error(path, errno);
  struct stat info = {};
  if (::fstat(fd.get(), &info) != 0) return system_error(path, errno);
  if (!S_ISREG(info.st_mode)) return error(moecclInvalidUsage, "{} is not a plain file", path);
  const bool of_root = info.st_uid == 0;
  if (!of_root && info.st_uid != ::geteuid())
    return error(moecclInvalidUsage, "{} belongs to user {}: it must be yours or root's", path, info.st_uid);
  // A user can read what root gives to the user's group.
  if ((info.st_mode & (of_root ? 037 : 077)) != 0)
    return error(moecclInvalidUsage, "{} has mode {:o}, so that others may use it: chmod 600", path,
                 info.st_mode & 0777);
  std::array<char, kLongest + 3> text;
  size_t n = 0;
  for (ssize_t got = 1; got != 0 && n < text.size();) {
    got = ::read(fd.get(), text.data() + n, text.size() - n);
    if (got < 0 && errno != EINTR) return system_error(path, errno);
    n += static_cast<size_t>(std::max<ssize_t>(got, 0));
  }
  while (n > 0 && (text[n - 1] == '\n' || text[n - 1] == '\r')) --n;
  if (n < kShortest || n > kLongest)
    return error(moecclInvalidUsage, "{} holds a secret of {}{} characters: give {} to {}", path,
                 n > kLongest ? "more than " : "", std::min(n, kLongest), kShortest, kLongest);
  return std::string(text.data(), n);
}

Result<Key> key_of_secret(const std::string& job) {
  struct Known {
    std::mutex mutex;
    std::map<std::string, Key> keys;
  };
  static constinit driver::PerProcess<Known> process;  // stretching takes long, and the program may fork meanwhile
  Known& known = process.get();
  const std::lock_guard lock(known.mutex);
  if (const auto at = known.keys.find(job); at != known.keys.end()) return at->second;
  MOECCL_ASSIGN_OR_RETURN(const std::string secret, read_secret());
  MOECCL_ASSIGN_OR_RETURN(const Key key, stretched(secret, job));
  known.keys.emplace(job, key);
  return key;
}

}  // namespace moeccl::bootstrap
