// SPDX-License-Identifier: Apache-2.0
#include "src/exec/flight.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <utility>

#include "moeccl/moeccl.h"
#include "src/base/clock.h"
#include "src/base/env.h"
#include "src/base/log.h"
#include "src/base/ticks.h"
#include "src/driver/children.h"
#include "src/driver/file.h"
#include "src/driver/memory.h"
#include "src/driver/process.h"
#include "src/exec/operation.h"

namespace moeccl::exec {
namespace {

constexpr size_t kPages = 512;  // of one file
constexpr size_t kPageBytes = (sizeof(FlightPage) + 4095) / 4096 * 4096;
// The texts about hosts follow all pages; only what is written takes memory. A host takes some 80 bytes.
constexpr size_t kHostsAt = kPages * kPageBytes, kHostsBytes = 16 << 20, kFileBytes = kHostsAt + kHostsBytes;
constexpr char kFile[] = "moeccl-flight";

struct File {
  Fd fd;
  driver::Mapping mapping;
  std::vector<bool> taken = std::vector<bool>(kPages);
  std::map<size_t, size_t> texts = {};  // place behind the pages, in whole pages of memory -> bytes

  bool holds(const FlightPage* page) const {
    const auto* at = reinterpret_cast<const std::byte*>(page);
    return at >= mapping.data() && at < mapping.data() + kPages * kPageBytes;
  }
  size_t index_of(const FlightPage* page) const {
    return static_cast<size_t>(reinterpret_cast<const std::byte*>(page) - mapping.data()) / kPageBytes;
  }

  // Returns the first place where a text of `bytes` fits, or nothing.
  std::optional<size_t> room_for(size_t bytes) const {
    size_t at = 0;
    for (const auto& [begin, size] : texts) {
      if (at + bytes <= begin) break;
      at = round_up_to_page(begin + size);
    }
    return bytes <= kHostsBytes - at ? std::optional(at) : std::nullopt;
  }
  void forget_text(FlightPage& page) {
    if (page.hosts_bytes == 0) return;
    driver::release_pages(fd, kHostsAt + page.hosts_at, round_up_to_page(page.hosts_bytes));
    texts.erase(page.hosts_at);
    page.hosts_bytes = 0;
  }

  static size_t round_up_to_page(size_t bytes) {
    return (bytes + driver::page_bytes() - 1) / driver::page_bytes() * driver::page_bytes();
  }
};

// The process's files: a new one when the others are full. The free page with the lowest number is taken first.
struct Store {
  std::mutex mutex, dump;
  std::string dumped_to;  // the file of the process `dumper`
  pid_t dumper = 0;
  bool checked_dump = false;
  std::deque<File> files;

  bool add_file() {
    // open_of() looks for the files among a process's descriptors, and would take a child for this process.
    auto made = [] {
      const driver::ForkPause pause;
      auto file = driver::shared_segment(kFile, kFileBytes);
      if (file.ok()) driver::keep_from_children(file->get());
      return file;
    }();
    if (!made.ok()) return false;
    auto mapped = driver::map_segment(*made, kPages * kPageBytes);
    if (!mapped.ok()) return false;
    files.push_back({std::move(*made), std::move(*mapped)});
    return true;
  }
  FlightPage* take() {
    const std::lock_guard lock(mutex);
    for (size_t f = 0;; ++f) {
      if (f == files.size() && !add_file()) return nullptr;
      File& file = files[f];
      const auto free = std::find(file.taken.begin(), file.taken.end(), false);
      if (free == file.taken.end()) continue;
      const auto i = static_cast<size_t>(free - file.taken.begin());
      // Reserved now, so that no store into the page can fail later.
      if (!driver::reserve_pages(file.fd, i * kPageBytes, kPageBytes).ok()) return nullptr;
      *free = true;
      return new (file.mapping.data() + i * kPageBytes) FlightPage;
    }
  }
  // Called under the lock.
  File& file_of(const FlightPage* page) {
    return *std::find_if(files.begin(), files.end(), [page](const File& f) { return f.holds(page); });
  }
  void give_back(FlightPage* page) {
    const std::lock_guard lock(mutex);
    page->magic.store(0, std::memory_order_release);
    File& file = file_of(page);
    file.forget_text(*page);
    const size_t i = file.index_of(page);
    driver::release_pages(file.fd, i * kPageBytes, kPageBytes);
    file.taken[i] = false;
  }
};

Store& store() {
  static driver::PerProcess<Store> stores;
  return stores.get();
}

// Converts text from another process's memory to one line that ends within its array.
template <size_t N>
std::string text_of(const char (&from)[N]) {
  std::string text(from, strnlen(from, N));
  std::replace_if(
      text.begin(), text.end(), [](char c) { return static_cast<unsigned char>(c) < 0x20; }, ' ');
  return text;
}

double ms(int64_t ns) { return static_cast<double>(ns) / 1e6; }

nlohmann::json json_of(const FlightRecord& r, int64_t now) {
  const auto op = static_cast<moecclOp_t>(r.op);
  const bool running = r.state == FlightRecord::State::kRunning;
  nlohmann::json j{{"sequence", r.sequence},
                   {"op", op_name(op)},
                   {"count", r.count},
                   {"type", moecclTypeName(static_cast<moecclDataType_t>(r.type))},
                   {"reduce", reduce_name(r.reduce)},
                   {r.sequence == 0 ? "peer" : "root", r.root},
                   {"plan", r.has_plan != 0 ? text_of(r.algorithm) : ""},
                   {"state", running                                   ? "running"
                             : r.state == FlightRecord::State::kFailed ? "failed"
                                                                       : "done"},
                   {"began_ms_ago", ms(Ticks::to_ns(now - r.start))}};
  if (r.state != FlightRecord::State::kDoneUntimed) j["took_ms"] = ms(Ticks::to_ns((running ? now : r.end) - r.start));
  return j;
}

nlohmann::json json_of(const FlightPage& p) {
  const int64_t now = Ticks::now(), now_monotonic = now_ns();
  nlohmann::json j{{"group", format("{:016x}", p.group)},
                   {"name", text_of(p.name)},
                   {"memory", p.on_cuda_memory != 0 ? "CUDA" : "host"},
                   {"rank", p.rank},
                   {"n_ranks", p.n_ranks},
                   {"state", p.failed_unix_ns == 0 ? "running" : "failed"},
                   {"operations", nlohmann::json::array()},
                   {"waits", nlohmann::json::array()}};
  if (p.failed_unix_ns != 0) {
    j["code"] = moecclGetErrorString(static_cast<moecclResult_t>(p.code));
    j["failure"] = text_of(p.failure);
    j["failed_unix_ms"] = p.failed_unix_ns / 1'000'000;
  }
  const uint64_t n = std::min<uint64_t>(p.count, FlightPage::kRecords);
  for (uint64_t i = p.count - n; i < p.count; ++i)
    j["operations"].push_back(json_of(p.records[i % FlightPage::kRecords], now));
  for (uint32_t i = 0; i < std::min(p.n_waits, FlightPage::kWaits); ++i) {
    const FlightWait& w = p.waits[i];
    const auto* peers = w.peers;
    nlohmann::json wait{{"what", text_of(w.text)},
                        {"sequence", w.sequence},
                        {"thread", w.thread},
                        {"blocked_ms", ms(now_monotonic - w.since_ns)},
                        {"for", std::vector<uint32_t>(peers, peers + std::min(w.n_peers, FlightWait::kPeers))},
                        {"for_total", w.n_peers}};
    if (w.awaits < p.n_ranks) wait["awaits"] = w.awaits;
    j["waits"].push_back(std::move(wait));
  }
  return j;
}

bool read_at(int fd, size_t offset, std::span<std::byte> bytes) {
  ssize_t n = 0;
  do {
    n = pread(fd, bytes.data(), bytes.size(), static_cast<off_t>(offset));
  } while (n < 0 && errno == EINTR);
  return n == static_cast<ssize_t>(bytes.size());
}

// Adds the communicators of one file. A page that changes meanwhile is partly old, which is acceptable for a human
// reader.
void read_file(int fd, nlohmann::json* communicators) {
  const auto page = std::make_unique<FlightPage>();
  const std::span<std::byte> bytes(reinterpret_cast<std::byte*>(page.get()), sizeof(FlightPage));
  for (size_t i = 0; i < kPages; ++i) {
    if (!read_at(fd, i * kPageBytes, bytes)) break;
    if (page->magic.load() != FlightPage::kMagic || page->bytes != sizeof(FlightPage)) continue;
    communicators->push_back(json_of(*page));
    std::string hosts(std::min<size_t>(page->hosts_bytes, kHostsBytes - std::min<size_t>(page->hosts_at, kHostsBytes)),
                      0);
    if (hosts.empty() || !read_at(fd, kHostsAt + page->hosts_at, std::as_writable_bytes(std::span(hosts)))) continue;
    nlohmann::json read = nlohmann::json::parse(hosts, nullptr, false);
    if (read.is_array()) communicators->back()["hosts"] = std::move(read);
  }
}

std::string read_all(std::span<const int> files, int pid) {
  nlohmann::json all{{"format", "moeccl-status"},
                     {"version", 1},
                     {"host", driver::host_identity().name()},
                     {"host_id", format("{:016x}", driver::host_identity().hash())},
                     {"pid", pid},
                     {"written_unix_ms", unix_ns() / 1'000'000},
                     {"communicators", nlohmann::json::array()}};
  for (const int fd : files) read_file(fd, &all["communicators"]);
  return all.dump(1, ' ', false, nlohmann::json::error_handler_t::replace);
}

Status made_none(int pid) { return error(moecclRemoteError, "pid {}: it has made no MoECCL communicator", pid); }

Result<std::vector<Fd>> open_of(int pid) {
  const std::string folder = format("/proc/{}/fd", pid);
  const std::unique_ptr<DIR, int (*)(DIR*)> dir(opendir(folder.c_str()), closedir);
  if (dir == nullptr) {
    if (errno == ENOENT) return error(moecclRemoteError, "pid {}: there is no such process on this host", pid);
    return error(moecclRemoteError, "pid {}: this user may not look at it ({}): ask as its owner or as root", pid,
                 std::strerror(errno));
  }
  std::vector<Fd> files;
  while (const dirent* entry = readdir(dir.get())) {
    char target[64] = {};
    const std::string path = folder + "/" + entry->d_name;
    if (readlink(path.c_str(), target, sizeof(target) - 1) <= 0) continue;
    if (!std::string_view(target).starts_with(format("/memfd:{}", kFile))) continue;
    Fd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
    if (!fd) {
      return error(moecclRemoteError, "pid {}: its flight recorder cannot be opened ({})", pid, std::strerror(errno));
    }
    files.push_back(std::move(fd));
  }
  if (files.empty()) return made_none(pid);
  return files;
}

}  // namespace

FlightSlot::FlightSlot() : page_(store().take()), shared_(page_ != nullptr) {
  if (!shared_) page_ = new FlightPage;
}

FlightSlot::~FlightSlot() {
  if (!shared_) {
    delete page_;
  } else if (birth_.here()) {
    store().give_back(page_);
  }
}

void FlightSlot::note_hosts(std::string_view json) {
  if (!shared_) return;
  Store& own = store();
  const std::lock_guard lock(own.mutex);
  File& file = own.file_of(page_);
  file.forget_text(*page_);
  const std::optional<size_t> at = json.empty() ? std::nullopt : file.room_for(json.size());
  if (!at.has_value()) return;
  // The file is in memory: either all is written, or memory is full.
  const ssize_t n = pwrite(file.fd.get(), json.data(), json.size(), static_cast<off_t>(kHostsAt + *at));
  if (n != static_cast<ssize_t>(json.size())) return;
  file.texts.emplace(*at, json.size());
  page_->hosts_at = static_cast<uint32_t>(*at);
  page_->hosts_bytes = static_cast<uint32_t>(json.size());
}

Result<std::string> flight_json(int pid) {
  if (pid < 0) return error(moecclInvalidArgument, "pid is {}: give a process's number, or 0 for this one", pid);
  if (pid == 0 || pid == getpid()) {
    Store& own = store();
    const std::lock_guard lock(own.mutex);
    if (own.files.empty()) return made_none(getpid());
    std::vector<int> files;
    for (const File& f : own.files) files.push_back(f.fd.get());
    return read_all(files, getpid());
  }
  MOECCL_ASSIGN_OR_RETURN(const std::vector<Fd> opened, open_of(pid));
  std::vector<int> files;
  for (const Fd& fd : opened) files.push_back(fd.get());
  return read_all(files, pid);
}

std::string dump_path(const std::string& named, const std::string& host, int pid) {
  const std::string path = for_process(named, host, pid);
  if (path == named) return format("{}.{}.{}.json", named, host, pid);
  if (for_process(named, "%h", pid) != named) return path;  // it has %p
  return driver::with_ending(path, format(".{}", pid));
}

void check_dump() noexcept {
  if (env().dump.empty()) return;
  (void)contained([]() -> Status {
    Store& own = store();
    const std::lock_guard lock(own.dump);
    if (std::exchange(own.checked_dump, true)) return {};
    const Status usable = driver::check_folder_of(dump_path(env().dump, driver::host_identity().hostname, getpid()));
    if (usable.ok()) return {};
    log(LogLevel::kWarn,
        "MOECCL_DUMP={}: {}: a communicator that fails will leave no file; make the folder, or let this user write "
        "there",
        env().dump, usable.message());
    return {};
  });
}

void dump_flight() noexcept {
  if (env().dump.empty()) return;
  const Status status = contained([]() -> Status {
    Store& own = store();
    const std::lock_guard lock(own.dump);
    MOECCL_ASSIGN_OR_RETURN(const std::string text, flight_json(0));
    if (own.dumper != getpid()) {
      MOECCL_ASSIGN_OR_RETURN(own.dumped_to,
                              driver::make_file(dump_path(env().dump, driver::host_identity().hostname, getpid())));
      own.dumper = getpid();
    }
    Status written = driver::replace_file(own.dumped_to, text);
    struct stat info {};
    if (!written.ok() && stat(own.dumped_to.c_str(), &info) == 0 && info.st_size == 0) {
      (void)unlink(own.dumped_to.c_str());
      own.dumper = 0;
    }
    return written;
  });
  if (!status.ok()) log(LogLevel::kError, "MOECCL_DUMP={}: {}", env().dump, status.message());
}

}  // namespace moeccl::exec
