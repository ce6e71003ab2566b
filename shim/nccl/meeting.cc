#include "shim/nccl/meeting.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

namespace moeccl::shim {
namespace {

ncclResult_t by_message(Comm& parent, const std::vector<int>& ranks, moecclUniqueId* id) {
  if (parent.rank != ranks.front()) {
    return from_moeccl(moecclRecv(id, sizeof *id, moecclUint8, ranks.front(), parent.ours, nullptr));
  }
  ncclResult_t result = from_moeccl(moecclGroupStart());
  for (size_t i = 1; i < ranks.size() && result == ncclSuccess; ++i) {
    result = from_moeccl(moecclSend(id, sizeof *id, moecclUint8, ranks[i], parent.ours, nullptr));
  }
  const ncclResult_t ended = from_moeccl(moecclGroupEnd());
  return result != ncclSuccess ? result : ended;
}

// FNV-1a, 64 bits. What keeps strangers out is the seed in it, the file's mode and the check of its owner.
uint64_t hash(const std::string& text, uint64_t start) {
  uint64_t h = 0xcbf29ce484222325u ^ start;
  for (const char c : text) h = (h ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return h;
}

// The same on all ranks of the list, another one each time that they meet.
std::string file_name(Comm& parent, const std::vector<int>& ranks) {
  std::string list;
  for (const int r : ranks) list += std::to_string(r) + ",";
  int nth = 0;
  {
    const std::lock_guard lock(parent.mutex);
    nth = parent.meetings[list]++;
  }
  const std::string all = std::string(parent.seed.begin(), parent.seed.end()) + list + std::to_string(nth);
  char name[48];
  std::snprintf(name, sizeof name, "moeccl-shim-%016llx%016llx", static_cast<unsigned long long>(hash(all, 0)),
                static_cast<unsigned long long>(hash(all, 0x9e3779b97f4a7c15u)));
  return std::string(access("/dev/shm", W_OK) == 0 ? "/dev/shm/" : "/tmp/") + name;
}

ncclResult_t write_file(const std::string& file, const moecclUniqueId& id) {
  const std::string draft = file + ".draft";
  const int fd = open(draft.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (fd < 0) return fail(ncclSystemError, "cannot create " + draft + ": " + std::strerror(errno));
  const bool whole = write(fd, &id, sizeof id) == static_cast<ssize_t>(sizeof id);
  close(fd);
  // Complete under its final name or not there at all.
  if (whole && rename(draft.c_str(), file.c_str()) == 0) return ncclSuccess;
  const std::string why = std::strerror(errno);
  unlink(draft.c_str());
  return fail(ncclSystemError, "cannot write " + file + ": " + why);
}

bool read_file(const std::string& file, moecclUniqueId* id) {
  const int fd = open(file.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
  if (fd < 0) return false;
  struct stat s;
  const bool good = fstat(fd, &s) == 0 && s.st_uid == geteuid() && (s.st_mode & 077) == 0 &&
                    read(fd, id, sizeof *id) == static_cast<ssize_t>(sizeof *id);
  close(fd);
  return good;
}

ncclResult_t await_file(const std::string& file, int leader, moecclUniqueId* id) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(settings().init_timeout_ms);
  while (!read_file(file, id)) {
    if (std::chrono::steady_clock::now() > end) {
      return fail(ncclRemoteError, "rank " + std::to_string(leader) +
                                       " of the old communicator did not come to the meeting of the survivors within " +
                                       std::to_string(settings().init_timeout_ms) +
                                       " ms: is it alive, on this host, and does it exclude the same ranks?");
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return ncclSuccess;
}

}  // namespace

Meeting::~Meeting() {
  if (!written_.empty()) unlink(written_.c_str());
}

ncclResult_t Meeting::agree(Comm& parent, const std::vector<int>& ranks, bool parent_works, moecclUniqueId* id) {
  const bool leads = parent.rank == ranks.front();
  if (leads) {
    const ncclResult_t result = from_moeccl(moecclGetUniqueId(id));
    if (result != ncclSuccess) return result;
  }
  if (ranks.size() == 1) return ncclSuccess;
  if (parent_works) return by_message(parent, ranks, id);
  const std::string file = file_name(parent, ranks);
  if (!leads) return await_file(file, ranks.front(), id);
  const ncclResult_t result = write_file(file, *id);
  if (result == ncclSuccess) written_ = file;
  return result;
}

}  // namespace moeccl::shim
