// Flags between processes of one host: 64-bit words in shared memory, stored with release and loaded with acquire, as the kernels do with
// system-scope stores and loads.
#pragma once

#include <atomic>
#include <cstdint>

namespace mok {

static_assert(std::atomic<int64_t>::is_always_lock_free, "flags are shared between processes");
static_assert(sizeof(std::atomic<int64_t>) == sizeof(int64_t), "flags are plain words in shared memory");

inline void store_flag(int64_t* flag, int64_t value) { reinterpret_cast<std::atomic<int64_t>*>(flag)->store(value, std::memory_order_release); }

inline int64_t load_flag(const int64_t* flag) { return reinterpret_cast<const std::atomic<int64_t>*>(flag)->load(std::memory_order_acquire); }

}  // namespace mok
