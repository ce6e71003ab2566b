// SPDX-License-Identifier: Apache-2.0
#include "src/bootstrap/place.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <functional>
#include <memory>
#include <vector>

#include "src/base/log.h"
#include "src/bootstrap/bootstrap.h"
#include "src/bootstrap/handout.h"
#include "src/bootstrap/handshake.h"
#include "src/bootstrap/patience.h"
#include "src/bootstrap/secret.h"
#include "src/driver/process.h"
#include "src/driver/thread.h"

namespace moeccl::bootstrap {
namespace {

constexpr int64_t kRetryMs = 5;
// The root of this job's previous communicator closes its listeners when all have joined. What still listens later is
// another program.
constexpr int64_t kInUseMs = 10'000;

struct Place {
  std::string host;
  uint16_t port = 0;
};

Result<Place> parse(const std::string& text) {
  const size_t colon = text.rfind(':');
  Place place;
  const char* const end = text.data() + text.size();
  const bool has_port = colon != std::string::npos && colon > 0;
  const auto parsed = has_port ? std::from_chars(text.data() + colon + 1, end, place.port) : std::from_chars_result{};
  if (!has_port || parsed.ec != std::errc() || parsed.ptr != end || place.port == 0)
    return error(moecclInvalidArgument, "the meeting place \"{}\" is not host:port, 10.0.0.1:4711 or [fd00::1]:4711",
                 text);
  place.host = text.substr(0, colon);
  return place;
}

// The listener checks the caller's user, and the caller the listener's, so the name need not be secret.
std::string handout_name(uint16_t port) {
  const std::string text = format("{} {}", ::geteuid(), port);
  const Key hash = derive_key(std::as_bytes(std::span(text.data(), text.size())), "moeccl place");
  std::string name = "moeccl-";
  for (const std::byte b : std::span(hash).first(12)) name += format("{:02x}", static_cast<unsigned>(b));
  return name;
}

Result<moecclUniqueId> start(const RootOptions& options, const std::function<Status()>& cancelled) {
  for (const Deadline until = Deadline::after_ms(kInUseMs);;) {
    Result<std::unique_ptr<Root>> root = Root::start(options);
    if (root.ok()) {
      const moecclUniqueId id = (*root)->id();
      Root::detach(std::move(*root));
      return id;
    }
    if (root.status().code() != moecclInvalidUsage || until.passed())
      return std::move(root).status().with_context("listening as rank 0");
    if (cancelled) MOECCL_TRY(cancelled());
    driver::sleep_ns(kRetryMs * 1'000'000);
  }
}

}  // namespace

Result<moecclUniqueId> unique_id_of_place(const std::string& text) {
  MOECCL_ASSIGN_OR_RETURN(const Place place, parse(text));
  MOECCL_ASSIGN_OR_RETURN(const std::vector<driver::SocketAddress> all, driver::resolve_all(place.host, place.port));
  UniqueId id;
  id.at_rank_0 = true;
  id.host_hash = driver::host_identity().hash();
  if (std::all_of(all.begin(), all.end(), std::mem_fn(&driver::SocketAddress::is_loopback))) {
    id.address = driver::unix_address(handout_name(place.port));
    return encode_unique_id(id);
  }
  if (!has_secret()) {
    return error(
        moecclInvalidUsage,
        "the ranks are to meet at {}, where other hosts reach them: set MOECCL_SECRET to the same secret of at "
        "least 16 characters on all ranks (it admits them), or MOECCL_SECRET_FILE to a file that holds it",
        text);
  }
  // A host may call itself by a loopback address, by which the others do not know it.
  id.address = *std::find_if_not(all.begin(), all.end(), std::mem_fn(&driver::SocketAddress::is_loopback));
  MOECCL_ASSIGN_OR_RETURN(const Key secret, key_of_secret("place " + id.address.str()));
  id.key = derive_key(secret, "moeccl place");
  id.host_hash = 0;  // the same id on all hosts
  return encode_unique_id(id);
}

Result<moecclUniqueId> meet_at_place(const UniqueId& id, uint32_t rank, Deadline deadline,
                                     const std::function<Status()>& cancelled) {
  const std::span<const std::byte> host = id.address.host_bytes();
  const std::string name(reinterpret_cast<const char*>(host.data()), host.size());
  if (rank == 0) {
    RootOptions options;
    options.timeout_ms = deadline.left_ms();
    if (id.address.is_unix()) {
      options.handout_name = name;
    } else {
      options.socket_addr = id.address.str();
      options.key = id.key;
    }
    return start(options, cancelled);
  }
  if (!id.address.is_unix()) {
    UniqueId there = id;
    there.at_rank_0 = false;
    return encode_unique_id(there);
  }
  for (Patience patience;;) {
    Result<moecclUniqueId> real = ask_for_handout(name, deadline);
    if (real.ok() || real.status().code() == moecclInvalidUsage) return real;  // InvalidUsage: another user's
    if (patience.ends())
      log(LogLevel::kWarn, "rank {} finds no rank 0 at its meeting place yet, and keeps trying: {}", rank,
          real.status().message());
    if (deadline.passed())
      return error(moecclTimeout, "rank {} found no rank 0 at its meeting place: {}", rank, real.status().message());
    if (cancelled) MOECCL_TRY(cancelled());
    driver::sleep_ns(kRetryMs * 1'000'000);
  }
}

}  // namespace moeccl::bootstrap
