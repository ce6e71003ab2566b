// SPDX-License-Identifier: Apache-2.0
// What belongs to one thread.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>

namespace moeccl {

// Returns the calling thread's number, which no other thread of the process has or had.
inline uint64_t thread_number() {
  static std::atomic<uint64_t> last{0};
  static thread_local uint64_t own = 0;
  if (own == 0) own = last.fetch_add(1, std::memory_order_relaxed) + 1;
  return own;
}

// One T for each thread, created at its first use and destroyed with the thread. A thread_local with a destructor would
// do the same, but glibc ends the process when it has no memory to register that destructor. Each object needs its own
// Tag type, because `this_thread` belongs to the type.
template <class T, class Tag>
class PerThread {
 public:
  // Throws when the process is out of memory.
  static T& get() {
    if (this_thread == nullptr) {
      static const Key key;
      this_thread = new T;
      if (key.made) (void)pthread_setspecific(key.key, this_thread);  // without the key, the T is never destroyed
    }
    return *this_thread;
  }

 private:
  struct Key {
    Key() : made(pthread_key_create(&key, end) == 0) {}
    ~Key() {  // threads may outlive the library
      if (made) pthread_key_delete(key);
    }
    pthread_key_t key{};
    bool made;
  };
  // Destructors of other keys may still call the library on this thread, which then gets a new T.
  static void end(void* t) {
    this_thread = nullptr;
    delete static_cast<T*>(t);
  }
  inline static thread_local T* this_thread = nullptr;
};

}  // namespace moeccl
