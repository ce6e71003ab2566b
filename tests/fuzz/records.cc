// SPDX-License-Identifier: Apache-2.0
// Encrypted connections whose records are cut into pieces, changed, repeated, dropped or reordered on their way.
// Whatever arrives, the accepted bytes are a prefix of the bytes sent.
#include "transport/tcp/stream.h"

#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

#include "tests/fuzz/fuzz.h"

using namespace moeccl;
using namespace moeccl::transport::tcp;

namespace {

using Bytes = std::vector<std::byte>;

// Takes all available bytes: into `to` first, and the rest into the stream's buffer. Returns false once the stream has
// ended or failed.
bool drain(Stream& s, Bytes& taken, size_t in_place) {
  while (s.readable()) {
    bool ended = false;
    if (!s.receive({}, &ended).ok() || ended) return false;
    Bytes to(in_place);
    const Result<Stream::Text> text = s.take_record(to);
    if (!text.ok()) return false;
    FUZZ_CHECK(text->in_place <= to.size() && text->in_place <= text->bytes);
    taken.insert(taken.end(), to.begin(), to.begin() + static_cast<ptrdiff_t>(text->in_place));
    const auto rest = s.arrived();
    taken.insert(taken.end(), rest.begin(), rest.end());
    s.consume(rest.size());
  }
  return true;
}

}  // namespace

// Input: the cipher, then commands of two bytes, which say what happens to the next record and how.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  const Cipher cipher = data[0] % 2 == 0 ? best_cipher() : Cipher::kChaCha20Poly1305;
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0) return 0;
  const RecordKeys keys{cipher, {std::byte{1}}, {std::byte{2}}};
  const Fd far(ends[0]);
  Stream near(Fd(ends[1]), 1.0, keys);
  RecordSealer peer(cipher, keys.receive);
  Bytes sent, taken, held, last;
  bool alive = true;
  const auto pass = [&](std::span<const std::byte> bytes) {
    if (!bytes.empty() && send(far.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT) < 0) alive = false;
  };
  for (size_t i = 1; i + 1 < size && alive; i += 2) {
    const uint8_t how = data[i + 1];
    Bytes text(1 + size_t{how} * 37 % 3000, static_cast<std::byte>(i)), record(text.size() + kRecordOverhead);
    peer.seal(text, record.data());
    sent.insert(sent.end(), text.begin(), text.end());
    switch (data[i] % 8) {
      case 0:
        record[how * size_t{131} % record.size()] ^= std::byte{1} << (how % 8);
        pass(record);
        break;
      case 1:  // dropped
        break;
      case 2:
        pass(record);
        pass(record);
        break;
      case 3:  // sent after the next one
        held = record;
        continue;
      case 4:
        pass(last);
        pass(record);
        break;
      case 5:  // bytes that no peer has sealed
        pass(std::as_bytes(std::span(data, std::min<size_t>(size, how))));
        pass(record);
        break;
      case 6: {  // in two pieces
        const size_t first = size_t{how} % record.size();
        pass(std::span(record).first(first));
        alive = drain(near, taken, how % 3 * 1500);
        near.look_again();
        pass(std::span(record).subspan(first));
        break;
      }
      default:
        pass(record);
    }
    pass(std::exchange(held, {}));
    last = record;
    near.look_again();
    alive = alive && drain(near, taken, how % 3 * 1500);
    FUZZ_CHECK(taken.size() <= sent.size() && std::equal(taken.begin(), taken.end(), sent.begin()));
  }
  return 0;
}
