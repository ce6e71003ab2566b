// SPDX-License-Identifier: Apache-2.0
// One T for each thread, made at its first use and destroyed with the thread. For what a thread_local with a destructor
// would do, if glibc did not end the process where there is no memory to register that destructor.
#pragma once

#include <pthread.h>

namespace moeccl {

// Tag: one type for each object, as `this_thread` belongs to the type.
template <class T, class Tag>
class PerThread {
 public:
  // Throws when there is no memory.
  static T& get() {
    if (this_thread == nullptr) {
      static const Key key;
      this_thread = new T;
      if (key.made) (void)pthread_setspecific(key.key, this_thread);  // without it the T stays for ever
    }
    return *this_thread;
  }

 private:
  struct Key {
    Key() : made(pthread_key_create(&key, [](void* t) { delete static_cast<T*>(t); }) == 0) {}
    ~Key() {  // threads may outlive the library
      if (made) pthread_key_delete(key);
    }
    pthread_key_t key{};
    bool made;
  };
  inline static thread_local T* this_thread = nullptr;
};

}  // namespace moeccl
