// SPDX-License-Identifier: Apache-2.0
#include "src/bootstrap/place.h"

#include <unistd.h>

#include <algorithm>
#include <functional>

#include "src/base/hex.h"
#include "src/base/log.h"
#include "src/base/text.h"
#include "src/bootstrap/bootstrap.h"
#include "src/bootstrap/handout.h"
#include "src/bootstrap/handshake.h"
#include "src/bootstrap/launcher.h"
#include "src/bootstrap/patience.h"
#include "src/bootstrap/secret.h"
#include "src/driver/process.h"
#include "src/driver/thread.h"

namespace moeccl::bootstrap {
namespace {

// The root of this job's previous communicator closes its listeners when all have joined. What still listens later is
// another program.
constexpr int64_t kInUseMs = 10'000;

struct Place {
  std::string host;
  uint16_t port = 0;
};

Result<Place> parse(const std::string& text) {
  const size_t colon = text.rfind(':');
  const bool has_port = colon != std::string::npos && colon > 0;
  const auto port = parse_number<uint16_t>(has_port ? std::string_view(text).substr(colon + 1) : "");
  if (port.value_or(0) == 0)
    return error(moecclInvalidArgument, "the meeting place \"{}\" is not host:port, 10.0.0.1:4711 or [fd00::1]:4711",
                 text);
  return Place{text.substr(0, colon), *port};
}

// The listener checks the caller's user, and the caller the listener's, so the name need not be secret. A loopback
// address and its port belong to one network namespace.
std::string handout_name(uint16_t port) {
  const std::string text = format("{} {} {}", ::geteuid(), port, driver::host_identity().network());
  const Key hash = derive_key(std::as_bytes(std::span(text.data(), text.size())), "moeccl place");
  return "moeccl-" + hex(std::span(hash).first(12));
}

// A name that is not known here is not loopback.
Result<bool> is_loopback_here(const std::string& host, Deadline deadline) {
  const auto all = driver::resolve_all(host, 0, deadline);
  if (all.status().code() == moecclTimeout) return all.status();
  return all.ok() && std::all_of(all->begin(), all->end(), std::mem_fn(&driver::SocketAddress::is_loopback));
}

Result<moecclUniqueId> id_of_handout(uint16_t port) {
  UniqueId id;
  id.at_rank_0 = true;
  id.host_hash = driver::host_identity().hash();
  id.address = driver::unix_address(handout_name(port));
  return encode_unique_id(id);
}

}  // namespace

Result<moecclUniqueId> unique_id_of_place(const std::string& text, Deadline deadline) {
  MOECCL_ASSIGN_OR_RETURN(const Place place, parse(text));
  if (is_loopback_name(place.host)) return id_of_handout(place.port);
  // A host's own name may be loopback on that host only. With a secret, the user is prepared for several hosts.
  if (!has_secret()) {
    MOECCL_ASSIGN_OR_RETURN(const bool loopback_here, is_loopback_here(place.host, deadline));
    if (loopback_here) return id_of_handout(place.port);
    return error(
        moecclInvalidUsage,
        "the ranks are to meet at {}, where other hosts reach them: set MOECCL_SECRET to the same secret of at "
        "least 16 characters on all ranks (it admits them), or MOECCL_SECRET_FILE to a file that holds it",
        text);
  }
  Result<UniqueId> made = place_of_rank_0("the meeting place", place.host, place.port, deadline);
  if (!made.ok()) {
    MOECCL_ASSIGN_OR_RETURN(const bool loopback_here, is_loopback_here(place.host, deadline));
    if (loopback_here) return id_of_handout(place.port);  // no network leads to other hosts
  }
  MOECCL_ASSIGN_OR_RETURN(UniqueId id, std::move(made));
  id.at_rank_0 = true;
  // All ranks have the text in common, and not what their hosts make of it.
  MOECCL_ASSIGN_OR_RETURN(const Key secret, key_of_secret("place " + text));
  id.key = derive_key(secret, "moeccl place");
  return encode_unique_id(id);
}

Result<moecclUniqueId> meet_at_place(const UniqueId& id, uint32_t rank, Deadline deadline,
                                     const std::function<Status()>& cancelled, int64_t lost_after_ms) {
  const std::span<const std::byte> host = id.address.host_bytes();
  const std::string name(reinterpret_cast<const char*>(host.data()), host.size());
  if (rank == 0) {
    RootOptions options;
    if (id.address.is_unix()) {
      options.timeout_ms = deadline.left_ms();
      options.handout_name = name;
    } else {
      options = root_at(id, deadline);
    }
    const Deadline until = Deadline::earlier(deadline, Deadline::after_ms(kInUseMs));
    Result<moecclUniqueId> started = Root::start_detached(options, until, cancelled);
    if (!started.ok()) return std::move(started).status().with_context("listening as rank 0");
    return started;
  }
  if (!id.address.is_unix()) {
    UniqueId there = id;
    there.at_rank_0 = false;
    return encode_unique_id(there);
  }
  const Deadline until = Deadline::earlier(deadline, Deadline::after_ms(lost_after_ms));
  for (Patience patience;;) {
    Result<moecclUniqueId> real = ask_for_next_handout(name, static_cast<int>(rank), until);
    if (real.ok() || real.status().code() == moecclInvalidUsage) return real;  // InvalidUsage: another user's
    if (patience.ends())
      log(LogLevel::kWarn, "rank {} finds no rank 0 at its meeting place yet, and keeps trying: {}", rank,
          real.status().message());
    if (until.passed())
      return error(moecclTimeout, "rank {} found no rank 0 at its meeting place: {}", rank, real.status().message());
    if (cancelled) MOECCL_TRY(cancelled());
    driver::sleep_ns(kRetryMs * 1'000'000);
  }
}

}  // namespace moeccl::bootstrap
