/* Low-latency calls on GPUs: deep_ep/kernels/low_latency.py, "Nothing is awaited at the end".

   Call n uses half n mod 2, and is two launches: one that sends and one that receives. Two calls may be in flight. A
   launch begins by telling in ACKS which calls this rank has finished, and call n writes to a peer only after that one has told that
   it has finished call n - 2. With MASKS, a wait that runs out masks the rank that it was
   for: nothing is sent to that one or read from it any more, while it may go on, late, and write where nobody reads.

   Mutations: FLAG_FIRST, NO_NUMBER, ONE_HALF, NO_ACK. */

#ifndef RANKS
#define RANKS 2
#endif
#ifndef CALLS
#define CALLS 4
#endif
#define IN_FLIGHT 2
#ifdef ONE_HALF
#define HALF(n) 0
#else
#define HALF(n) ((n) % 2)
#endif
#define AT(dst, half, src) (((dst) * 2 + (half)) * RANKS + (src))
#ifdef NO_NUMBER
#define HAS_ROWS(src, n) (signal[AT(_pid, HALF(n), src)] > 0)
#else
#define HAS_ROWS(src, n) (signal[AT(_pid, HALF(n), src)] == n)
#endif
#ifdef MASKS
#define IS_MASKED(peer) (masked & (1 << (peer)))
#else
#define IS_MASKED(peer) false
#endif

byte ack[2 * RANKS * RANKS];
byte signal[2 * RANKS * RANKS];
byte first_word[2 * RANKS * RANKS];
byte second_word[2 * RANKS * RANKS];

#define FOR_EACH_PEER peer = 0; do :: peer < RANKS ->
#define END :: else -> break od

inline open_door() {
  FOR_EACH_PEER
     if
     :: IS_MASKED(peer)
     :: else -> ack[AT(peer, 0, _pid)] = done[0]; ack[AT(peer, 1, _pid)] = done[1]
     fi;
     peer++
  END
}

inline send(n) {
  open_door();
#ifndef NO_ACK
  FOR_EACH_PEER
     if
     :: n < 3 || IS_MASKED(peer) || ack[AT(_pid, HALF(n), peer)] >= n - 2 -> peer++
#ifdef MASKS
     :: n >= 3 && peer != _pid && ack[AT(_pid, HALF(n), peer)] < n - 2 -> masked = masked | (1 << peer); peer++
#endif
     fi
  END;
#endif
  FOR_EACH_PEER
     if
     :: IS_MASKED(peer)
     :: else ->
#ifdef FLAG_FIRST
        signal[AT(peer, HALF(n), _pid)] = n;
#endif
        first_word[AT(peer, HALF(n), _pid)] = n;
        second_word[AT(peer, HALF(n), _pid)] = n;
#ifndef FLAG_FIRST
        signal[AT(peer, HALF(n), _pid)] = n
#endif
     fi;
     peer++
  END
}

inline receive(n) {
  open_door();
  FOR_EACH_PEER
     if
     :: IS_MASKED(peer) -> peer++
     :: !IS_MASKED(peer) && HAS_ROWS(peer, n) ->
        assert(first_word[AT(_pid, HALF(n), peer)] == n);
        assert(second_word[AT(_pid, HALF(n), peer)] == n);
        peer++
#ifdef MASKS
     :: !IS_MASKED(peer) && peer != _pid && !HAS_ROWS(peer, n) -> masked = masked | (1 << peer); peer++
#endif
     fi
  END;
  done[HALF(n)] = n
}

active [RANKS] proctype rank() {
  byte sent = 0, received = 0, peer, masked = 0;
  byte done[2];
  do
  :: sent < CALLS && sent - received < IN_FLIGHT -> sent++; send(sent)
  :: received < sent -> received++; receive(received)
  :: received == CALLS -> break
  od
}
