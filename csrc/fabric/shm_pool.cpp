#include "shm_pool.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <ctime>

namespace dmuon {
namespace {

constexpr char kFolder[] = "/dev/shm";
constexpr size_t kHeaderBytes = 4096;

struct Header {
  std::atomic<uint32_t> ready;   // 1: the rest is written
  std::atomic<uint32_t> mapped;  // peers that have this memory
  char settings[256];
};
static_assert(sizeof(Header) <= kHeaderBytes);

Header* header_of(std::byte* start) { return reinterpret_cast<Header*>(start); }

double now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

// Others are being started meanwhile: nobody is in a hurry here.
void nap() {
  const timespec time{0, 500'000};
  nanosleep(&time, nullptr);
}

std::string prefix() { return "/dmuon-" + std::to_string(getuid()) + "-"; }

std::string name_of(const std::string& job, int rank) {
  return prefix() + job + "-" + std::to_string(rank);
}

[[noreturn]] void fail(const std::string& what, const std::string& name) {
  throw ShmError(what + " " + kFolder + name + ": " + std::strerror(errno));
}

// Raises unless a segment belongs to this user and to nobody else, as create() makes it.
void check_private(const struct stat& status, const std::string& name) {
  constexpr mode_t kPermissions = 07777, kPrivate = 0600;
  if (status.st_uid == geteuid() && (status.st_mode & kPermissions) == kPrivate) return;
  char text[128];
  std::snprintf(text, sizeof text,
                ": belongs to user %u with mode %04o, expected user %u with %04o",
                static_cast<unsigned>(status.st_uid), status.st_mode & kPermissions,
                static_cast<unsigned>(geteuid()), kPrivate);
  throw ShmError(std::string(kFolder) + name + text +
                 "; it is not mapped, because others could read and write it");
}

class File {
 public:
  explicit File(int file) : file_(file) {}
  ~File() {
    if (file_ >= 0) close(file_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  int get() const { return file_; }

 private:
  int file_;
};

// Remove what jobs of this user left when they were killed before their memory lost its name. A
// rank holds a lock on its segment as long as it has a name; the kernel gives the lock up with the
// process. (A process number would not do: another container that shares the folder numbers anew.)
void remove_stale() {
  DIR* folder = opendir(kFolder);
  if (folder == nullptr) return;
  const std::string begin = prefix().substr(1);
  while (const dirent* entry = readdir(folder)) {
    const std::string file_name = entry->d_name;
    if (file_name.compare(0, begin.size(), begin) != 0) continue;
    const std::string name = "/" + file_name;
    const File file(shm_open(name.c_str(), O_RDWR | O_CLOEXEC, 0));
    if (file.get() < 0 || flock(file.get(), LOCK_EX | LOCK_NB) != 0) continue;
    // Another rank that starts may have removed it meanwhile, and a live job have taken the name.
    // Invariant: only who holds the lock removes the name, so a name that is there is this file's.
    struct stat status;
    if (fstat(file.get(), &status) == 0 && status.st_nlink > 0) shm_unlink(name.c_str());
  }
  closedir(folder);
}

}  // namespace

ShmPool::ShmPool(const std::string& job, int rank, const std::vector<int>& peers, uint64_t bytes,
                 const std::string& settings, double timeout_seconds)
    : rank_(rank), bytes_(kHeaderBytes + bytes), settings_(settings), timeout_(timeout_seconds) {
  const double deadline = now() + timeout_seconds;
  remove_stale();
  try {
    create(name_of(job, rank));
    for (const int peer : peers) attach(job, peer, deadline);
    wait_until_mapped(peers.size(), deadline);
    if (!disagreement_.empty()) throw ShmError(disagreement_);
  } catch (...) {
    release();
    throw;
  }
  shm_unlink(name_.c_str());
  name_.clear();
  close(file_);
  file_ = -1;
}

ShmPool::~ShmPool() { release(); }

std::byte* ShmPool::memory(int rank) const {
  for (const Mapping& mapping : mappings_) {
    if (mapping.rank == rank) return mapping.start + kHeaderBytes;
  }
  return nullptr;
}

void ShmPool::create(const std::string& name) {
  for (;;) {
    file_ = shm_open(name.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
    if (file_ < 0) {
      if (errno == EEXIST) {
        throw ShmError(std::string(kFolder) + name +
                       " exists: another running job of this user has the same name");
      }
      fail("cannot create", name);
    }
    name_ = name;
    // Another job's remove_stale() may have come between creation and lock. It holds its lock until
    // the name is gone, so this does not wait long, and the count then shows it.
    if (flock(file_, LOCK_SH) != 0) fail("cannot lock", name);
    struct stat status;
    if (fstat(file_, &status) != 0) fail("cannot look at", name);
    if (status.st_nlink > 0) break;
    close(file_);
    file_ = -1;
    name_.clear();
  }
  if (ftruncate(file_, static_cast<off_t>(bytes_)) != 0) fail("cannot size", name);
  // Now, with an error: a write to memory that the folder has no room for would end the process.
  int error;
  do {
    error = posix_fallocate(file_, 0, static_cast<off_t>(bytes_));
  } while (error == EINTR);
  if (error != 0) {
    struct statvfs space {};
    statvfs(kFolder, &space);
    throw ShmError(std::string(kFolder) + ": rank " + std::to_string(rank_) + " needs " +
                   std::to_string(bytes_ >> 20) + " MiB, " +
                   std::to_string((space.f_bavail * space.f_frsize) >> 20) + " MiB are free (" +
                   std::strerror(error) + "); ask for a smaller window, or give it more " +
                   "(docker run --shm-size, mount -o remount,size=... /dev/shm)");
  }
  mappings_.push_back({rank_, map(file_, name)});
  Header* header = header_of(mappings_[0].start);
  std::strncpy(header->settings, settings_.c_str(), sizeof header->settings - 1);
  header->ready.store(1, std::memory_order_release);
}

std::byte* ShmPool::map(int file, const std::string& name) {
  void* start = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (start == MAP_FAILED) fail("cannot map", name);
  return static_cast<std::byte*>(start);
}

void ShmPool::attach(const std::string& job, int peer, double deadline) {
  const std::string name = name_of(job, peer);
  const auto late = [&](const char* what) {
    if (!disagreement_.empty()) throw ShmError(disagreement_);
    char seconds[32];
    std::snprintf(seconds, sizeof seconds, "%.1f", timeout_);
    throw ShmTimeout("shared memory of job " + job + ": rank " + std::to_string(rank_) +
                     " waited " + seconds + " s for rank " + std::to_string(peer) + " to " + what);
  };
  for (;; nap()) {
    const File file(shm_open(name.c_str(), O_RDWR | O_CLOEXEC, 0));
    if (file.get() < 0 && errno != ENOENT) fail("cannot open", name);
    struct stat status;
    if (file.get() >= 0 && fstat(file.get(), &status) != 0) fail("cannot look at", name);
    // Before anything in it is believed: anybody may have put a file here under the peer's name.
    if (file.get() >= 0) check_private(status, name);
    // Room for the header means that the size is set; the rest must then be right.
    if (file.get() < 0 || status.st_size < static_cast<off_t>(kHeaderBytes)) {
      if (now() > deadline) late("create its own");
      continue;
    }
    // Sizes may differ only with the settings: map what is surely there to read these.
    void* start = mmap(nullptr, kHeaderBytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
    if (start == MAP_FAILED) fail("cannot map", name);
    Header* header = static_cast<Header*>(start);
    const bool ready = header->ready.load(std::memory_order_acquire) != 0;
    const std::string theirs = ready ? std::string(header->settings) : std::string();
    // Only noted: whoever left now would take its name along, and the other would wait for it.
    if (ready && theirs != settings_) {
      disagreement_ = "job " + job + ": rank " + std::to_string(rank_) + " has " + settings_ +
                      ", rank " + std::to_string(peer) + " has " + theirs;
    } else if (ready) {
      mappings_.push_back({peer, map(file.get(), name)});
    }
    if (ready) header->mapped.fetch_add(1);
    munmap(start, kHeaderBytes);
    if (ready) return;
    if (now() > deadline) late("fill in its own");
  }
}

void ShmPool::wait_until_mapped(size_t peers, double deadline) {
  const std::atomic<uint32_t>& mapped = header_of(mappings_[0].start)->mapped;
  while (mapped < peers) {
    if (now() > deadline) {
      if (!disagreement_.empty()) throw ShmError(disagreement_);
      char text[160];
      std::snprintf(text, sizeof text,
                    "shared memory: rank %d waited %.1f s for %zu of its %zu peers to map it",
                    rank_, timeout_, peers - mapped, peers);
      throw ShmTimeout(text);
    }
    nap();
  }
}

void ShmPool::release() {
  for (const Mapping& mapping : mappings_) munmap(mapping.start, bytes_);
  mappings_.clear();
  if (!name_.empty()) shm_unlink(name_.c_str());
  name_.clear();
  if (file_ >= 0) close(file_);
  file_ = -1;
}

}  // namespace dmuon
