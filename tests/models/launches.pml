/* Launches of the GPU engine in normal mode: deep_ep/kernels/signal.py, "Reuse".

   In launch n a rank writes to a peer only after that peer has told, in FINISHED, that it has ended launch n - 1. So
   one buffer is enough, and nothing is awaited at the end. A wait that runs out does not end the kernel: it marks the
   state as broken and goes on, but what it reads is not used.

   Mutations: FLAG_FIRST, NO_NUMBER, NO_FINISHED. */

#ifndef RANKS
#define RANKS 2
#endif
#define LAUNCHES 3
#define AT(dst, src) ((dst) * RANKS + (src))
#ifdef NO_NUMBER
#define HAS_ROWS(src, n) (signal[AT(_pid, src)] > 0)
#else
#define HAS_ROWS(src, n) (signal[AT(_pid, src)] == n)
#endif

byte finished[RANKS * RANKS];
byte signal[RANKS * RANKS];
byte first_word[RANKS * RANKS];
byte second_word[RANKS * RANKS];

active [RANKS] proctype rank() {
  byte n = 1, peer;
  bool is_broken = false;
  do
  :: n > LAUNCHES || is_broken -> break
  :: else ->
#ifndef NO_FINISHED
     peer = 0;
     do
     :: peer < RANKS ->
        if
        :: peer == _pid || finished[AT(_pid, peer)] >= n - 1 -> peer++
#ifndef CALM
        :: peer != _pid && finished[AT(_pid, peer)] < n - 1 -> is_broken = true; peer++
#endif
        fi
     :: else -> break
     od;
#endif
     if
     :: is_broken -> break /* the host never launches again */
     :: else
     fi;
     peer = 0;
     do
     :: peer < RANKS ->
#ifdef FLAG_FIRST
        signal[AT(peer, _pid)] = n;
#endif
        first_word[AT(peer, _pid)] = n;
        second_word[AT(peer, _pid)] = n;
#ifndef FLAG_FIRST
        signal[AT(peer, _pid)] = n;
#endif
        peer++
     :: else -> break
     od;
     peer = 0;
     do
     :: peer < RANKS ->
        if
        :: HAS_ROWS(peer, n) ->
           assert(is_broken || first_word[AT(_pid, peer)] == n);
           assert(is_broken || second_word[AT(_pid, peer)] == n);
           peer++
#ifndef CALM
        :: !HAS_ROWS(peer, n) -> is_broken = true; peer++
#endif
        fi
     :: else -> break
     od;
     peer = 0;
     do
     :: peer < RANKS -> finished[AT(peer, _pid)] = n; peer++
     :: else -> break
     od;
     n++
  od
}
