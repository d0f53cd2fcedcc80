#include "shm.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <ctime>

namespace dmuon {
namespace {

// Not FUTEX_PRIVATE_FLAG: sleepers and writers are different processes.
long futex(std::atomic<uint32_t>* word, int operation, uint32_t value, const timespec* limit) {
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), operation, value, limit, nullptr, 0);
}

}  // namespace

void ShmBell::ring() {
  if (sleepers == 0) return;
  rings.fetch_add(1);
  futex(&rings, FUTEX_WAKE, INT_MAX, nullptr);
}

ShmBell::Slept ShmBell::sleep(uint32_t seen, double seconds) {
  timespec limit;
  limit.tv_sec = static_cast<time_t>(seconds);
  limit.tv_nsec = static_cast<long>((seconds - static_cast<double>(limit.tv_sec)) * 1e9);
  // Returns at once if `rings` is not `seen` any more.
  if (futex(&rings, FUTEX_WAIT, seen, &limit) == 0) return Slept::rung;
  if (errno == EINTR) return Slept::interrupted;
  return errno == ETIMEDOUT ? Slept::late : Slept::rung;
}

void stream_copy(std::byte* to, const std::byte* from, size_t n) {
#if defined(__SSE2__)
  auto* target = reinterpret_cast<__m128i*>(to);
  const auto* source = reinterpret_cast<const __m128i*>(from);
  for (size_t i = 0; i < n / sizeof(__m128i); ++i) {
    _mm_stream_si128(target + i, _mm_load_si128(source + i));
  }
  // Invariant: these stores do not take part in release order of their own; finish() comes later.
  _mm_sfence();
#else
  std::memcpy(to, from, n);
#endif
}

}  // namespace dmuon
