#include "src/driver/thread.h"

#include <pthread.h>
#include <signal.h>

#include <system_error>

namespace moeccl::driver {

Result<std::thread> start_thread(const char* name, std::function<void()> body) {
  // Blocked before the thread exists: it inherits the mask, so no signal can reach it in between.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread thread;
  int failure = 0;
  try {
    thread = std::thread(std::move(body));
  } catch (const std::system_error& e) {
    failure = e.code().value();
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (failure != 0) return system_error(format("starting thread {}", name), failure);
  pthread_setname_np(thread.native_handle(), std::string(name).substr(0, 15).c_str());
  return thread;
}

}  // namespace moeccl::driver
