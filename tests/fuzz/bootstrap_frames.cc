// SPDX-License-Identifier: Apache-2.0
// Arbitrary bytes as the input from a bootstrap peer: payloads of messages, heads of control frames, handshake frames.
#include <algorithm>
#include <cstring>
#include <vector>

#include "src/bootstrap/control.h"
#include "src/bootstrap/handshake.h"
#include "src/bootstrap/messages.h"
#include "tests/fuzz/fuzz.h"

using namespace moeccl;
using namespace moeccl::bootstrap;

namespace {

void payloads(std::span<const std::byte> bytes, size_t n_ranks) {
  const Status failure = decode_failure(bytes);
  FUZZ_CHECK(!failure.ok());
  std::vector<Peer> peers;
  if (decode_peers(bytes, n_ranks, &peers)) FUZZ_CHECK(peers.size() == n_ranks);
  std::vector<std::vector<std::byte>> blobs;
  if (decode_blobs(bytes, n_ranks, &blobs)) {
    FUZZ_CHECK(blobs.size() == n_ranks);
    FUZZ_CHECK(std::ranges::equal(encode_blobs(blobs), bytes));
  }
  std::vector<std::vector<std::byte>> rows;
  if (decode_rows(bytes, n_ranks, &rows)) {
    size_t n = 0;
    for (const auto& row : rows) n += 2 * sizeof(uint32_t) + row.size();
    FUZZ_CHECK(rows.size() == n_ranks && n == bytes.size());
  }
  std::vector<uint32_t> numbers;
  std::span<const std::byte> rest;
  if (decode_numbers(bytes, &numbers, &rest)) {
    std::vector<std::byte> again = encode_numbers(numbers);
    again.insert(again.end(), rest.begin(), rest.end());
    FUZZ_CHECK(std::ranges::equal(again, bytes));
  }
  RankSet ranks;
  if (decode_ranks(bytes, n_ranks, &ranks)) FUZZ_CHECK(ranks.size() == n_ranks);
}

// Whatever its bytes, a head must never be opened unless it is the very one that was sealed.
void heads(std::span<const std::byte> bytes) {
  Key key = {};
  key[0] = std::byte{1};
  ControlHeadBytes head = {};
  std::memcpy(head.data(), bytes.data(), std::min(bytes.size(), head.size()));
  Opener opener(key);
  Sealer sealer(key);
  const auto opened = opener.open(head, 1 << 20);
  if (!opened.ok()) return;
  FUZZ_CHECK(sealer.seal(opened.value()) == head);
}

void handshakes(std::span<const std::byte> bytes) {
  Key key = {};
  HandshakeFrame frame = {};
  std::memcpy(frame.data(), bytes.data(), std::min(bytes.size(), frame.size()));
  (void)starts_like_handshake(bytes);
  const Party root{.role = Role::kRoot, .rank = 0, .n_ranks = 2},
      member{.role = Role::kMember, .rank = 1, .n_ranks = 2};
  ServerHandshake server(key, root, Nonce{});
  (void)server.on_hello(frame, Role::kMember);
  FUZZ_CHECK(!server.on_proof(frame));  // a hello is not a proof
  ClientHandshake client(key, member, Nonce{});
  FUZZ_CHECK(!client.answer(frame, Role::kRoot).ok() || bytes.size() >= kHandshakeFrameBytes);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  const auto bytes = std::as_bytes(std::span(data + 2, size - 2));
  switch (data[0] % 3) {
    case 0:
      payloads(bytes, size_t{1} + data[1] % 64);
      break;
    case 1:
      heads(bytes);
      break;
    default:
      handshakes(bytes);
  }
  return 0;
}
